"""Cells of Python in a workspace's kernels, and what they say."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from perdure.wire.public.common import Answer, Body, ErrorInfo, Seconds

CODE_CHARS_MAX = 1 << 20
Context = Annotated[
    str, Field(pattern=r"^[a-z0-9]([a-z0-9_-]{0,30}[a-z0-9])?$", description="Which kernel: each name has one of its own.")
]
DEFAULT_CONTEXT = "default"
PythonEventType = Literal[
    "queued",
    "started",
    "stream",
    "display_data",
    "update_display_data",
    "execute_result",
    "error",
    "done",
    "failed",
    "heartbeat",
]


class RunPython(Body):
    """A cell. After ``timeout_s`` seconds of running it is interrupted; the kernel and its variables live on.

    ``exec_id`` is chosen by the client (``exe_…``): a call repeated with the same id attaches to the cell instead of running it
    again.
    """

    code: Annotated[str, Field(max_length=CODE_CHARS_MAX)]
    context: Context = DEFAULT_CONTEXT
    timeout_s: Annotated[Seconds, Field(gt=0)] | None = None
    exec_id: Annotated[str, Field(pattern=r"^exe_[0-9a-z]{8,40}$")] | None = None


class PythonContext(Body):
    context: Context = DEFAULT_CONTEXT


class PythonKernel(Answer):
    """A kernel that is ready. ``restarted``: there was another one before, whose variables are gone; ``reason`` says why."""

    context: str
    kernel: int = Field(description="The how-manieth of its context.")
    restarted: bool
    reason: str = ""


class PythonInterrupted(Answer):
    interrupted: bool = Field(description="Whether a cell ran.")


class PythonEvent(Answer):
    """One line of a cell's stream.

    ``queued`` (ahead: cells before it), ``started`` (kernel; restarted and reason where it follows another one), ``stream``
    (stream, text), ``display_data``, ``update_display_data`` and ``execute_result`` (data by MIME type, as Jupyter has it: images
    and other bytes as base64; omitted: types too large to be sent; display_id), ``error`` (name, value, traceback: Python's),
    ``heartbeat``. The last line is ``done`` (status, execution_count, truncated) or ``failed`` (failure: Perdure's).

    ``offset`` is where a stream that broke is taken up again behind this event.
    """

    type: PythonEventType
    exec_id: str | None = None
    offset: int = 0
    ahead: int = 0
    kernel: int = 0
    restarted: bool = False
    reason: str = ""
    stream: Literal["stdout", "stderr"] | None = None
    text: str = ""
    data: dict[str, Any] = Field(default_factory=dict)
    omitted: list[str] = Field(default_factory=list)
    display_id: str | None = None
    name: str = ""
    value: str = ""
    traceback: str = ""
    status: Literal["ok", "error", "interrupted", "timeout"] | None = None
    execution_count: int | None = None
    truncated: bool = False
    failure: ErrorInfo | None = None
