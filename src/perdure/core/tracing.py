"""Traces: which step of a request took how long, from HTTP to the guest, by OpenTelemetry where an operator asks for it.

Without that nothing of its SDK is imported and ``span`` does next to nothing. A server that is asked (``configure``)
exports by the standard OTEL_* environment; the SDK is the extra ``otel``. A client's ``traceparent`` (W3C Trace Context) is
taken in, and passed on to commands in workspaces, whether spans are made or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perdure.core.config import OtelSettings
from perdure.core.errors import HostUnfit, InvalidRequest, PerdureError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider as SdkProvider
    from opentelemetry.trace import Span, Tracer, TracerProvider

#: Version 00 is all there is; an all-zero id is none.
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_EXTRA = "Install it: pip install 'perdure[otel]'."

#: What the caller of the current request said about itself.
_caller: ContextVar[str] = ContextVar("perdure_traceparent", default="")


class _Current:
    """Of this process: None makes no spans."""

    tracer: Tracer | None = None


def configure(asked: OtelSettings, release: str) -> SdkProvider | None:
    """Make spans from here on and export them, if the environment asks for it. The caller shuts the provider down in the end.

    Raises HostUnfit without the SDK or the exporter, InvalidRequest for an exporter that nobody has."""
    if not asked.exporters:
        return None
    try:
        from opentelemetry.sdk import trace as sdk
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise HostUnfit("The environment asks for traces, and the OpenTelemetry SDK is not installed.", hint=_EXTRA) from error
    # The environment's own name of the service goes before ours.
    named = {} if asked.has_service_name else {SERVICE_NAME: "perdure"}
    provider = sdk.TracerProvider(resource=Resource.create({**named, SERVICE_VERSION: release}))
    for name in asked.exporters:
        provider.add_span_processor(BatchSpanProcessor(_exporter(name, asked.protocol)))
    use(provider)
    return provider


def _exporter(name: str, protocol: str) -> Any:
    from importlib.metadata import entry_points

    full = {"otlp": "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"}.get(name, name)
    for found in entry_points(group="opentelemetry_traces_exporter", name=full):
        try:
            return found.load()()
        except ImportError as error:
            raise HostUnfit(f"The exporter {full!r} of OpenTelemetry cannot be loaded: {error}.", hint=_EXTRA) from error
    raise InvalidRequest(f"OTEL_TRACES_EXPORTER: nobody has an exporter named {full!r}.", hint=f"Use otlp or console. {_EXTRA}")


def use(provider: TracerProvider | None) -> None:
    """Make spans with this provider; None: no more."""
    _Current.tracer = None if provider is None else provider.get_tracer("perdure")


@contextmanager
def span(name: str, **attributes: Any) -> Iterator[None]:
    """A step. What it raises is its status: an error of ours by its code, never by its words."""
    tracer = _Current.tracer
    if tracer is None:
        yield
        return
    with tracer.start_as_current_span(
        name, attributes=_plain(attributes), record_exception=False, set_status_on_exception=False
    ) as begun:
        try:
            yield
        except BaseException as error:
            _failed(begun, error)
            raise


class Served:
    """The span of a request, told in the end what became of it."""

    def __init__(self, span: Span | None) -> None:
        self._span = span

    def told(self, name: str, status: int, **attributes: Any) -> None:
        span = self._span
        if span is None:
            return
        span.update_name(name)
        span.set_attributes(_plain({"http.response.status_code": status, **attributes}))
        if status >= 500:
            _mark(span, str(status))


@contextmanager
def request(traceparent: str, tracestate: str, **attributes: Any) -> Iterator[Served]:
    """The request of a caller who sent these headers; what is no traceparent counts as none."""
    parent = traceparent if _TRACEPARENT.fullmatch(traceparent) else ""
    tracer = _Current.tracer
    if tracer is None:
        token = _caller.set(parent)
        try:
            yield Served(None)
        finally:
            _caller.reset(token)
        return
    from opentelemetry.trace import SpanKind

    with tracer.start_as_current_span(
        "request",
        context=_extracted(parent, tracestate),
        kind=SpanKind.SERVER,
        attributes=_plain(attributes),
        record_exception=False,
        set_status_on_exception=False,
    ) as begun:
        yield Served(begun)


def _extracted(parent: str, state: str) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": parent, "tracestate": state}, context=Context())


def traceparent() -> str:
    """For whoever is asked next: of the current span, else what the caller sent; "" where there is neither."""
    if _Current.tracer is None:
        return _caller.get()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")


@dataclass(frozen=True, slots=True)
class Carried:
    """Of a piece of work, for the task that goes on with it."""

    context: Any
    caller: str


def carry() -> Carried:
    """What belongs to the current trace."""
    if _Current.tracer is None:
        return Carried(None, _caller.get())
    from opentelemetry.context import get_current

    return Carried(get_current(), _caller.get())


@contextmanager
def carried(by: Carried) -> Iterator[None]:
    """Inside the block spans belong where ``by`` was taken."""
    token = _caller.set(by.caller)
    attached = None
    if by.context is not None:
        from opentelemetry.context import attach

        attached = attach(by.context)
    try:
        yield
    finally:
        if attached is not None:
            from opentelemetry.context import detach

            detach(attached)
        _caller.reset(token)


def _failed(span: Span, error: BaseException) -> None:
    if isinstance(error, PerdureError):
        _mark(span, error.code)
    elif isinstance(error, Exception):
        _mark(span, type(error).__name__)
    else:  # cancelled: whoever waited has gone, which is no failure of the step
        span.set_attribute("perdure.cancelled", True)


def _mark(span: Span, kind: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR))


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """As OpenTelemetry writes names, with dots (``http__route`` in Python); what is None is left out."""
    return {name.replace("__", "."): value for name, value in attributes.items() if value is not None}
