"""The warm process of a worker: imports the handlers once, then runs one invocation after the other.

``python -m perdure.worker.child FD NAME=MODULE:HANDLER…``. What it hears and says over the socket FD are frames: a length, then
JSON. Standard library only, so that a handler's process holds nothing but the handler.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from perdure.worker.launch import die_with_parent

HEADER = struct.Struct(">I")
#: The module whose decorator makes a function durable: its wrapper has the user's names (functools.wraps), but not their globals.
DURABLE = "aws_durable_execution_sdk_python.execution"

Handler = Callable[[Any, Any], Any]


class Context:
    """What AWS Lambda's Python runtime passes beside the event."""

    function_version = "$LATEST"
    memory_limit_in_mb = "0"
    log_group_name = "/perdure/worker"
    log_stream_name = str(os.getpid())
    client_context = None
    identity = None
    tenant_id = None

    def __init__(self, job: dict[str, Any]) -> None:
        self.aws_request_id: str = job["request_id"]
        self.function_name: str = job["function"]
        self.invoked_function_arn: str = job["function_arn"]
        self._ends_at = time.monotonic() + job["timeout_s"]

    def get_remaining_time_in_millis(self) -> int:
        return max(0, int((self._ends_at - time.monotonic()) * 1000))


def load(place: str) -> Handler:
    """``module:handler``. Raises what importing it raises; TypeError for what can be no handler."""
    module_name, _, name = place.partition(":")
    handler: Any = import_module(module_name)
    for part in name.split("."):
        handler = getattr(handler, part)
    if not callable(handler):
        raise TypeError(f"{place} is no function")
    if inspect.iscoroutinefunction(handler):
        raise TypeError(f"{place} is async; a handler is a plain function of event and context")
    return handler  # type: ignore[no-any-return]


def is_durable(handler: Handler) -> bool:
    """Whether AWS's ``@durable_execution`` is among its decorators."""
    seen: Any = handler
    while seen is not None:
        if getattr(seen, "__globals__", {}).get("__name__") == DURABLE:
            return True
        seen = getattr(seen, "__wrapped__", None)
    return False


def digest(module_name: str) -> str:
    """Of the source files that importing the handler has loaded from its own project: below the directory that its top-level
    module or package lies in, without installed packages."""
    module = sys.modules[module_name]
    own = Path(module.__file__ or sys.argv[0]).resolve()
    root = own.parents[module_name.count(".") + (own.name == "__init__.py")]
    parts = hashlib.sha256()
    for path in sorted({own, *_sources(root)}):
        parts.update(f"{path.relative_to(root)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return parts.hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    for module in list(sys.modules.values()):
        place = getattr(module, "__file__", None)
        if not isinstance(place, str) or module.__name__ == "__main__":
            continue
        path = Path(place).resolve()
        if path.is_relative_to(root) and not {"site-packages", "dist-packages"} & set(path.parts) and path.is_file():
            yield path


def invoke(handler: Handler, job: dict[str, Any]) -> dict[str, Any]:
    """What came of one invocation, as a message."""
    try:
        result = handler(job["event"], Context(job))
    except Exception as error:  # noqa: BLE001 - the top of an invocation: told to the server
        traceback.print_exception(error)
        return {"type": "raised", "error": _kind(error), "message": str(error), "stack": _stack(error)}
    try:
        return {"type": "answered", "body": json.dumps(result, allow_nan=False)}
    except (TypeError, ValueError, RecursionError) as error:
        said = f"What the handler returned is not JSON: {error}"
        sys.stderr.write(said + "\n")
        return {"type": "invalid", "error": "Runtime.MarshalError", "message": said, "stack": []}


def _kind(error: BaseException) -> str:
    return type(error).__name__


def _stack(error: BaseException) -> list[str]:
    """Without this module's own frame."""
    return traceback.format_tb(error.__traceback__)[1:]


# ----------------------------------------------------------------------------------------------------------------------- the loop


def send(link: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    link.sendall(HEADER.pack(len(data)) + data)


def receive(link: socket.socket) -> dict[str, Any] | None:
    """None when the worker has closed it."""
    head = _exactly(link, HEADER.size)
    if head is None:
        return None
    data = _exactly(link, HEADER.unpack(head)[0])
    return None if data is None else json.loads(data)


def _exactly(link: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = link.recv(min(count - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _loaded(places: list[str]) -> tuple[dict[str, Handler], dict[str, Any]]:
    """The handlers by name, and the first message."""
    handlers, served, place = dict[str, Handler](), list[dict[str, Any]](), ""
    try:
        for named in places:
            name, _, place = named.partition("=")
            handlers[name] = load(place)
            served.append({"name": name, "durable": is_durable(handlers[name])})
        for one, named in zip(served, places, strict=True):
            one["digest"] = digest(named.partition("=")[2].partition(":")[0])
    except Exception as error:  # noqa: BLE001 - the top of a process: whatever a user's module raises is told
        traceback.print_exception(error)
        return {}, {"type": "unfit", "place": place, "error": _kind(error), "message": str(error)}
    return handlers, {"type": "ready", "functions": served}


def main(argv: list[str]) -> int:
    die_with_parent()
    descriptor = int(argv[0])
    os.set_inheritable(descriptor, False)
    with socket.socket(fileno=descriptor) as link:
        handlers, first = _loaded(argv[1:])
        send(link, first)
        if not handlers:
            return 1
        while (job := receive(link)) is not None:
            send(link, invoke(handlers[job["function"]], job))
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
