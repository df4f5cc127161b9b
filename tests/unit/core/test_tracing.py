"""Spans where an operator asks for them, nothing where not, and a caller's traceparent in both."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from perdure.core import tracing
from perdure.core.config import OtelSettings, otel_settings
from perdure.core.errors import InvalidRequest, NotFound
from perdure.core.inbox import Inbox

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield exporter
    tracing.use(None)


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def parent_of(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


def test_steps_of_a_request_hang_on_the_callers_span(spans: InMemorySpanExporter) -> None:
    with tracing.request(PARENT, "vendor=1", http__request__method="GET") as served:
        with tracing.span("inner", perdure__workspace="ws_1", nothing=None):
            inside = tracing.traceparent()
        served.told("GET get_workspace", 200, http__route="/v1/workspaces/{ref}")
    found = by_name(spans)
    root, inner = found["GET get_workspace"], found["inner"]
    assert f"{root.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{parent_of(root):016x}" == PARENT.split("-")[2]
    assert root.parent is not None
    assert root.parent.trace_state.get("vendor") == "1"
    assert parent_of(inner) == root.context.span_id
    assert inside == f"00-{inner.context.trace_id:032x}-{inner.context.span_id:016x}-01"
    assert inner.attributes == {"perdure.workspace": "ws_1"}
    assert root.attributes is not None
    assert root.attributes["http.response.status_code"] == 200
    assert root.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("wrong", ["", "00-0-0-00", PARENT.upper(), PARENT + "x", "00-" + "0" * 32 + "-b7ad6b7169203331-01"])
def test_what_is_no_traceparent_begins_a_trace(spans: InMemorySpanExporter, wrong: str) -> None:
    with tracing.request(wrong, ""):
        pass
    (span,) = spans.get_finished_spans()
    assert span.parent is None


def test_a_step_that_fails_has_its_code_and_not_its_words(spans: InMemorySpanExporter) -> None:
    with pytest.raises(NotFound), tracing.span("ours"):
        raise NotFound("There is no workspace 'secret'.")
    with pytest.raises(RuntimeError), tracing.span("foreign"):
        raise RuntimeError("secret")
    with pytest.raises(asyncio.CancelledError), tracing.span("left"):
        raise asyncio.CancelledError
    found = by_name(spans)
    assert [dict(found[name].attributes or {}) for name in ("ours", "foreign", "left")] == [
        {"error.type": "not_found"},
        {"error.type": "RuntimeError"},
        {"perdure.cancelled": True},
    ]
    assert [found[name].status.status_code for name in ("ours", "left")] == [StatusCode.ERROR, StatusCode.UNSET]
    assert all("secret" not in span.to_json() for span in found.values())


def test_a_server_error_is_an_error_of_the_request(spans: InMemorySpanExporter) -> None:
    for status in (404, 503):
        with tracing.request("", "") as served:
            served.told(f"GET {status}", status)
    found = by_name(spans)
    assert found["GET 404"].status.status_code is StatusCode.UNSET
    assert found["GET 503"].status.status_code is StatusCode.ERROR


async def test_a_job_belongs_to_the_trace_of_whoever_asked(spans: InMemorySpanExporter) -> None:
    inbox = Inbox("ws_1", 10, lambda _error: None)

    async def job() -> None:
        with tracing.span("job"):
            await asyncio.sleep(0)

    async def ask(name: str) -> None:
        with tracing.span(name):
            await inbox.run(job)

    await asyncio.gather(ask("one"), ask("two"))
    finished = spans.get_finished_spans()
    askers = [span.context.span_id for span in finished if span.name in {"one", "two"}]
    assert sorted(parent_of(span) or 0 for span in finished if span.name == "job") == sorted(askers)


async def test_without_spans_the_callers_traceparent_still_goes_on() -> None:
    inbox = Inbox("ws_1", 10, lambda _error: None)

    async def job() -> str:
        with tracing.span("nothing", a="b"):
            return tracing.traceparent()

    with tracing.request(PARENT, "") as served:
        assert await inbox.run(job) == PARENT
        served.told("GET x", 500)
    with tracing.request("rubbish", ""):
        assert tracing.traceparent() == ""
    assert tracing.traceparent() == ""


@pytest.mark.parametrize(
    ("variables", "asked"),
    [
        ({}, OtelSettings(protocol="http/protobuf")),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, OtelSettings(("otlp",), "http/protobuf")),
        (
            {"OTEL_TRACES_EXPORTER": "otlp, console", "OTEL_SERVICE_NAME": "x"},
            OtelSettings(("otlp", "console"), "http/protobuf", True),
        ),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "x"}, OtelSettings(protocol="http/protobuf")),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, OtelSettings(("otlp",), "grpc")),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, OtelSettings()),
    ],
)
def test_the_standard_environment_decides(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], asked: OtelSettings
) -> None:
    for name in ("TRACES_EXPORTER", "EXPORTER_OTLP_ENDPOINT", "EXPORTER_OTLP_PROTOCOL", "SDK_DISABLED", "SERVICE_NAME"):
        monkeypatch.delenv(f"OTEL_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert otel_settings() == asked


def python(code: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_spans_go_to_the_exporter_that_the_environment_names() -> None:
    code = """
from perdure.core import tracing
from perdure.core.config import otel_settings
provider = tracing.configure(otel_settings(), "1.2.3")
with tracing.span("a step"):
    pass
provider.shutdown()
"""
    said = python(code, OTEL_TRACES_EXPORTER="console")
    assert '"name": "a step"' in said
    assert '"service.name": "perdure"' in said
    assert '"service.version": "1.2.3"' in said
    assert '"service.name": "mine"' in python(code, OTEL_TRACES_EXPORTER="console", OTEL_SERVICE_NAME="mine")


def test_an_exporter_that_nobody_has_is_told() -> None:
    with pytest.raises(InvalidRequest, match="nobody has an exporter named 'pigeon'"):
        tracing.configure(OtelSettings(("pigeon",), ""), "1")
    assert tracing.configure(OtelSettings(), "1") is None


def test_a_server_that_exports_nothing_imports_nothing_for_it() -> None:
    """Of OpenTelemetry the API is there, because FastAPI imports it."""
    loaded = set(python("import sys, perdure.wiring; print(*sys.modules)").split())
    assert "perdure.core.tracing" in loaded
    assert not loaded & {"opentelemetry.sdk", "opentelemetry.exporter", "prometheus_client"}
