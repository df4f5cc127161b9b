"""What an invocation sends and what comes back, without any I/O: the async and the sync surface share it."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from perdure.core.errors import InvalidRequest
from perdure.sdk import _core
from perdure.sdk._core import Call
from perdure.wire import public

JSON = "application/json"
SSE = "text/event-stream"


class InvokeOptions(TypedDict, total=False):
    """Of ``invoke``. ``timeout_s`` is how long the call waits for the answer to begin, and within it for more; its connection is
    then closed, and the program may go on. ``headers`` are passed to the program under the contract's custom prefix."""

    session_id: str  # default: the workspace's id
    content_type: str  # default: JSON, or octets for bytes
    accept: str
    headers: Mapping[str, str]
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class InvokeResult:
    """What the program answered, be it an error of its own: ``ok`` tells."""

    status: int
    content_type: str
    content: bytes

    @property
    def ok(self) -> bool:
        return self.status < 400

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        """The answer as JSON. Raises InvalidRequest when it is none."""
        return _parsed(self.content)


@dataclass(frozen=True, slots=True)
class InvokeEvent:
    """One server-sent event; of an answer that is none, the whole of it."""

    data: str
    event: str = "message"
    id: str = ""

    def json(self) -> Any:
        """Its data as JSON. Raises InvalidRequest when it is none."""
        return _parsed(self.data)


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidRequest("The program's answer is not JSON.", hint="Use its text or content.") from error


def invocation(ref: str, payload: object, options: InvokeOptions) -> Call:
    """The call of an invocation. It is never repeated by itself: nobody knows what a program does twice."""
    if unknown := sorted(set(options) - set(InvokeOptions.__annotations__)):
        names = ", ".join(sorted(InvokeOptions.__annotations__))
        raise InvalidRequest(f"invoke has no option {unknown[0]!r}.", hint=f"Its options are {names}.")
    if isinstance(payload, bytes | bytearray | memoryview):
        content, kind = bytes(payload), "application/octet-stream"
    else:
        try:
            content, kind = json.dumps(payload).encode(), JSON
        except (TypeError, ValueError) as error:
            raise InvalidRequest(
                f"The payload cannot be written as JSON: {error}.", hint="Pass bytes, or plain values."
            ) from error
    headers = {"content-type": options.get("content_type", kind), "accept": options.get("accept", f"{JSON}, {SSE}, */*")}
    headers |= {public.CUSTOM_PREFIX + name.lower(): value for name, value in options.get("headers", {}).items()}
    if "session_id" in options:
        headers[public.SESSION_HEADER] = options["session_id"]
    return Call("POST", _core.workspace_path(ref, "invocations"), content=content, headers=tuple(headers.items()))


@dataclass(slots=True)
class EventReader:
    """Server-sent events (WHATWG HTML, 9.2.6) out of bytes in any pieces."""

    is_stream: bool
    _decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    _text: str = ""
    _data: list[str] = field(default_factory=list)
    _event: str = ""
    _id: str = ""

    def feed(self, piece: bytes) -> Iterator[InvokeEvent]:
        """The events that are complete with this piece."""
        self._text += self._decoder.decode(piece)
        if not self.is_stream:
            return
        held = self._text.endswith("\r")  # half of a CRLF, perhaps
        lines = (self._text[:-1] if held else self._text).replace("\r\n", "\n").replace("\r", "\n").split("\n")
        self._text = lines.pop() + ("\r" if held else "")
        for line in lines:
            event = self._take(line.removeprefix("\ufeff"))
            if event is not None:
                yield event

    def _take(self, line: str) -> InvokeEvent | None:
        if not line:
            data, event = self._data, self._event
            self._data, self._event = [], ""
            return InvokeEvent("\n".join(data), event or "message", self._id) if data else None
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        elif name == "id":
            self._id = value
        return None

    def end(self) -> Iterator[InvokeEvent]:
        """What is left: of a stream nothing, since an event without its empty line is not whole."""
        if not self.is_stream:
            yield InvokeEvent(self._text + self._decoder.decode(b"", final=True))
