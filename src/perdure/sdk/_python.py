"""Cells of Python and what they give, without any I/O: the async and the sync surface share it."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from typing import Any

from perdure.core.errors import PerdureError, RateLimited, Unavailable
from perdure.sdk import _core
from perdure.sdk._core import RECONNECTS, Call, delay_s
from perdure.sdk.errors import ConnectionLost, rebuild
from perdure.wire import public


@dataclass(frozen=True, slots=True)
class PythonError:
    """An exception that ended a cell."""

    name: str
    value: str
    traceback: str

    def __str__(self) -> str:
        return f"{self.name}: {self.value}" if self.value else self.name


@dataclass(frozen=True, slots=True)
class PythonOutput:
    """What a cell showed, or with ``is_result`` its value, as the kernel gives it: ``data`` by MIME type, as Jupyter has it.

    ``omitted`` are types that were too large to be sent.
    """

    data: dict[str, Any]
    is_result: bool = False
    omitted: tuple[str, ...] = ()
    display_id: str | None = None

    @property
    def text(self) -> str | None:
        return self._text("text/plain")

    @property
    def html(self) -> str | None:
        return self._text("text/html")

    @property
    def svg(self) -> str | None:
        return self._text("image/svg+xml")

    @property
    def markdown(self) -> str | None:
        return self._text("text/markdown")

    @property
    def json(self) -> Any:
        return self.data.get("application/json")

    @property
    def png(self) -> bytes | None:
        return self.bytes_of("image/png")

    @property
    def jpeg(self) -> bytes | None:
        return self.bytes_of("image/jpeg")

    def bytes_of(self, mime: str) -> bytes | None:
        """What Jupyter carries as base64: images, PDF. None where there is none of that type, or it is not base64."""
        value = self._text(mime)
        if value is None:
            return None
        try:
            return base64.b64decode("".join(value.split()), validate=True)
        except (binascii.Error, ValueError):
            return None

    def _text(self, mime: str) -> str | None:
        value = self.data.get(mime)
        return value if isinstance(value, str) else None


@dataclass(frozen=True, slots=True)
class PythonResult:
    """How a cell ended. An exception in it is a result, not an exception here: ``ok`` tells, and ``error`` has it.

    ``status``: ok, error, interrupted, timeout. ``restarted``: it ran in a new kernel, without the variables of the one before,
    and ``reason`` says why. ``truncated``: it said more than was kept.
    """

    exec_id: str
    status: str
    stdout: str
    stderr: str
    results: tuple[PythonOutput, ...]
    error: PythonError | None
    execution_count: int | None
    kernel: int
    restarted: bool
    reason: str
    truncated: bool

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def timed_out(self) -> bool:
        return self.status == "timeout"

    @property
    def text(self) -> str | None:
        """The value of the cell's last expression, as text."""
        return next((one.text for one in reversed(self.results) if one.is_result), None)

    @property
    def png(self) -> bytes | None:
        """The last picture."""
        return next((one.png for one in reversed(self.results) if one.png is not None), None)


class CellFollower:
    """Follows one cell across broken connections: which call comes next, what a line means, when to give up.

    A start is repeated with the same id (the server then attaches), a stream is taken up where it broke, and only while the
    workspace is at the same generation: so nothing runs twice, and nothing is said twice.
    """

    def __init__(self, ref: str, cell: public.RunPython) -> None:
        assert cell.exec_id is not None
        self.exec_id = cell.exec_id
        self.finished = False
        self._ref = ref
        self._cell = cell
        self._generation: int | None = None
        self._offset = 0
        self._seen = self._may_run = False
        self._breaks = 0

    def next_call(self) -> Call:
        if not self._seen:
            body = self._cell.model_dump(mode="json", exclude_defaults=True)
            return _core.post(_core.workspace_path(self._ref, "python"), body, keyed=True)
        return _core.get(
            _core.workspace_path(self._ref, "python", "cells", self.exec_id),
            context=self._cell.context,
            offset=self._offset,
            generation=self._generation,
        )

    def opened(self, generation: str | None) -> None:
        """A stream is open."""
        self._seen = True
        if generation is not None:
            self._generation = int(generation)

    def feed(self, line: bytes) -> public.PythonEvent | None:
        """One line of the stream; raises the error that ended it."""
        event = public.PythonEvent.model_validate_json(line)
        self._breaks = 0
        if event.type == "failed":
            raise rebuild({"error": event.failure.model_dump() if event.failure else None}, 500)
        if event.type == "heartbeat":
            return None
        self._offset = event.offset
        self.finished = event.type == "done"
        return event

    def broke(self, error: PerdureError) -> float:
        """Seconds to wait before the stream is taken up again; raises ``error`` when that is pointless."""
        self._may_run |= self._seen or error.ambiguous
        again = self._may_run and error.code in {"unavailable", "server_unreachable", "busy"}
        self._breaks += 1
        if isinstance(error, RateLimited) and self._breaks <= RECONNECTS:
            return _core.welcome_s(error)
        if not (again or isinstance(error, ConnectionLost)) or self._breaks > RECONNECTS:
            if self._may_run and isinstance(error, Unavailable):
                error.ambiguous, error.retryable = True, False  # whoever runs it once more runs another one
            raise error
        return delay_s(self._breaks)


@dataclass(slots=True)
class CellCollector:
    """Puts together what a cell says."""

    exec_id: str
    stdout: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)
    results: list[PythonOutput] = field(default_factory=list)
    error: PythonError | None = None
    started: public.PythonEvent | None = None
    done: public.PythonEvent | None = None

    def add(self, event: public.PythonEvent) -> PythonOutput | str | None:
        """What is new of its output."""
        if event.type == "stream":
            (self.stderr if event.stream == "stderr" else self.stdout).append(event.text)
            return event.text
        if event.type in ("display_data", "update_display_data", "execute_result"):
            is_result = event.type == "execute_result"
            output = PythonOutput(event.data, is_result, tuple(event.omitted), event.display_id)
            self._show(output, is_update=event.type == "update_display_data")
            return output
        if event.type == "error":
            self.error = PythonError(event.name, event.value, event.traceback)
        elif event.type == "started":
            self.started = event
        elif event.type == "done":
            self.done = event
        return None

    def _show(self, output: PythonOutput, *, is_update: bool) -> None:
        """An update takes the place of what it updates."""
        if is_update:
            for place, one in enumerate(self.results):
                if one.display_id == output.display_id:
                    self.results[place] = output
                    return
        self.results.append(output)

    def result(self) -> PythonResult:
        started, done = self.started, self.done
        return PythonResult(
            exec_id=self.exec_id,
            status=(done.status if done else None) or "error",
            stdout="".join(self.stdout),
            stderr="".join(self.stderr),
            results=tuple(self.results),
            error=self.error,
            execution_count=done.execution_count if done else None,
            kernel=started.kernel if started else 0,
            restarted=bool(started and started.restarted),
            reason=started.reason if started else "",
            truncated=bool(done and done.truncated) or any(one.omitted for one in self.results),
        )
