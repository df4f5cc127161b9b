"""What the SDK says and how it judges the answers, without doing any I/O: the async and the sync client share all of it."""

from __future__ import annotations

import base64
import codecs
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import ValidationError

from perdure.core.config import Settings
from perdure.core.errors import InvalidRequest, PerdureError, RateLimited, Unavailable
from perdure.sdk._events import (
    backup_event as backup_event,  # noqa: PLC0414
)
from perdure.sdk._events import (
    image_event as image_event,  # noqa: PLC0414
)
from perdure.sdk._events import (
    verify_event as verify_event,  # noqa: PLC0414
)
from perdure.sdk._events import (
    watch_event as watch_event,  # noqa: PLC0414
)
from perdure.sdk.errors import CallTimedOut, ConnectionLost, ServerUnreachable, StillRunning, rebuild
from perdure.wire import public

CONNECT_TIMEOUT_S = 5.0
#: A stream that is silent for so long is dead: the server sends heartbeats.
SILENCE_S = 4.5 * public.HEARTBEAT_S
KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]
RETRIES = 4
#: How long a call waits for its turn under the rate limit where its caller has set no time of its own.
PATIENCE_S = 30.0
#: No call waits longer than this for an upload; who has more patience asks again.
PUSH_WAIT_S = 30.0
#: How often a stream that broke is taken up again before the caller is told; with ``delay_s`` that is about half a minute.
RECONNECTS = 20
CHUNK_BYTES = 256 * 1024
#: What is asked for at a time of a list that is read to its end.
PAGE = 500


@dataclass(frozen=True, slots=True)
class Target:
    """Where the server is. ``label`` is for messages."""

    base_url: str
    socket: Path | None
    key: str | None = field(repr=False)
    label: str

    @property
    def websocket_url(self) -> str:
        return "ws" + self.base_url.removeprefix("http")

    @property
    def has_tls(self) -> bool:
        """Whether certificates are checked; loading them takes a while."""
        return self.base_url.startswith("https://")

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}


def find_server(settings: Settings) -> Target:
    """``PERDURE_URL`` with its key, else the Unix socket under ``PERDURE_HOME``."""
    if settings.url is None:
        return Target("http://perdure", settings.api_socket, None, str(settings.api_socket))
    url = settings.url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"The server's URL {url!r} is not one.", hint="Set PERDURE_URL to http://HOST:PORT.")
    key = settings.api_key
    if key is None and os.access(settings.api_key_file, os.R_OK):
        key = settings.api_key_file.read_text().strip() or None
    return Target(url, None, key, url)


def unreachable(target: Target, reason: str) -> ServerUnreachable:
    if target.socket is not None and target.socket.exists() and not os.access(target.socket, os.W_OK):
        hint = "Run this as the user who started the server, or set PERDURE_URL and PERDURE_API_KEY."
        return ServerUnreachable(f"You may not open {target.label}: it belongs to another user.", hint=hint)
    detail = f" ({reason})" if reason and target.socket is None else ""
    return ServerUnreachable(f"No Perdure server answers at {target.label}{detail}.")


# ------------------------------------------------------------------------------------------------------------------- calls


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request as data. ``repeatable``: doing it twice is the same as doing it once. ``keyed``: that is so because of an
    id in it that only this call knows, so that whoever calls once more makes another request."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    body: Mapping[str, Any] | None = None
    repeatable: bool = False
    keyed: bool = False
    content: bytes | None = None  # in place of ``body``: sent as it is
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def payload(self) -> dict[str, Any]:
        """What the HTTP client is told of it beside method and URL."""
        told: dict[str, Any] = {"headers": dict(self.headers)} if self.headers else {}
        if self.content is not None:
            return {"content": self.content, **told}
        return {"json": self.body, **told} if self.body is not None else told

    @property
    def url(self) -> str:
        if not self.query:
            return self.path
        return self.path + "?" + "&".join(f"{quote(name)}={_quote(value)}" for name, value in self.query)


def _quote(value: str) -> str:
    return quote(value.encode("utf-8", "surrogateescape"), safe="")


def workspace_path(ref: str, *rest: str) -> str:
    """``/v1/workspaces/REF/…`` with every part quoted."""
    if not ref or "/" in ref or ref in {".", ".."}:
        raise InvalidRequest(f"{ref!r} is not a workspace's name or id.", hint="List them with 'perdure ls'.")
    return "/".join(["/v1/workspaces", *(_quote(part) for part in (ref, *rest))])


def port_path(ref: str, kind: str, port: int) -> str:
    """``/v1/workspaces/REF/ports/PORT``, or ``shares``."""
    return workspace_path(ref, kind, str(checked_port(port)))


def checked_port(port: int) -> int:
    if not 0 < port < 65536:
        raise InvalidRequest(f"{port} is not a TCP port.", hint="Ports are 1 to 65535.")
    return port


def snapshot_path(ref: str, snapshot: str) -> str:
    """``/v1/workspaces/REF/snapshots/SNAPSHOT``."""
    if not snapshot or "/" in snapshot or snapshot in {".", ".."}:
        raise InvalidRequest(f"{snapshot!r} is not a snapshot's name or id.", hint="List them with 'perdure snapshot ls NAME'.")
    return workspace_path(ref, "snapshots", snapshot)


def get(path: str, /, **query: object) -> Call:
    return Call("GET", path, query_of(query), repeatable=True)


def post(path: str, body: Mapping[str, Any] | None = None, *, repeatable: bool = False, keyed: bool = False) -> Call:
    return Call("POST", path, body=body if body is not None else {}, repeatable=repeatable or keyed, keyed=keyed)


def start_exec(ref: str, start: public.StartExec, key: str | None) -> Call:
    """The start of a command: by its id, and by the idempotency key if it has one, it can be repeated."""
    body = start.model_dump(mode="json", exclude_defaults=True)
    headers = () if key is None else ((public.IDEMPOTENCY_HEADER, key),)
    return Call("POST", workspace_path(ref, "execs"), body=body, repeatable=True, keyed=key is None, headers=headers)


def check_key(key: str | None) -> str | None:
    """An idempotency key as a header can carry it. Raises InvalidRequest."""
    if key is not None and not (key.isascii() and key.isprintable() and key == key.strip() and 0 < len(key) <= 255):
        raise InvalidRequest(f"{key!r} is not an idempotency key.", hint="Use 1 to 255 printable ASCII characters.")
    return key


def query_of(values: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Query parameters: None is left out, booleans as the API writes them."""
    return tuple(
        (name, str(value).lower() if isinstance(value, bool) else str(value))
        for name, value in values.items()
        if value is not None
    )


def instant(moment: datetime | None) -> str | None:
    """As the API reads it. Raises InvalidRequest for a time without its offset, which may mean any hour."""
    if moment is not None and moment.tzinfo is None:
        raise InvalidRequest("A time without its offset from UTC was given.", hint="Use datetime.now(UTC), or astimezone().")
    return None if moment is None else moment.isoformat()


def next_page(call: Call, cursor: str) -> Call:
    """The same call for the page that begins at a cursor."""
    return replace(call, query=(*(pair for pair in call.query if pair[0] != "cursor"), ("cursor", cursor)))


def delay_s(attempt: int) -> float:
    """Seconds before attempt number ``attempt`` (from 1): 0.1, 0.2, 0.4 … at most 2."""
    return float(min(2.0, 0.1 * 2 ** (attempt - 1)))


def patience_s(timeout_s: float | None) -> float:
    """How long a call that comes too often is put off before its caller is told: as long as one answer may take."""
    return PATIENCE_S if timeout_s is None else timeout_s


def retry_after_s(
    call: Call, error: PerdureError, attempt: int, left_s: float = PATIENCE_S, *, was_sent: bool = True
) -> float | None:
    """Seconds to wait before the call is repeated, None when it must not be. ``attempt`` counts from 1. ``left_s`` is what is
    left of ``patience_s``: a call that was put off by the rate limit is repeated as long as its turn comes within it."""
    if isinstance(error, RateLimited):
        wait_s = welcome_s(error)
        return wait_s if call.repeatable and wait_s <= left_s else None
    if attempt > RETRIES or isinstance(error, CallTimedOut):
        return None
    if isinstance(error, ServerUnreachable):  # there is none; or it has gone since the first attempt, and may be starting again
        return None if attempt == 1 else delay_s(attempt)
    if isinstance(error, ConnectionLost):
        return delay_s(attempt) if call.repeatable or not was_sent else None
    refused = error.code in {"busy", "unavailable"} and error.retryable and not error.ambiguous
    return delay_s(attempt) if refused else None


def welcome_s(error: RateLimited) -> float:
    """Seconds after which the server takes a call of this key again."""
    try:
        return min(3600.0, max(0.05, float(error.details["retry_after_s"])))
    except (KeyError, ValueError):
        return 1.0


def lines(buffer: bytearray, chunk: bytes) -> Iterator[bytes]:
    """Feed a chunk, get the lines that are complete; the rest stays in ``buffer``."""
    buffer += chunk
    while (end := buffer.find(b"\n")) >= 0:
        line = bytes(buffer[:end])
        del buffer[: end + 1]
        if line:
            yield line


# ---------------------------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes a command wrote: ``offset`` bytes of this stream came before, ``gap`` bytes just before were lost unread."""

    stream: str
    data: bytes
    offset: int
    gap: int = 0

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended. A nonzero exit is a result, not an exception; ``exit_code`` is None when the outcome is unknown."""

    exec_id: str
    end: str
    exit_code: int | None
    signal: int | None
    detail: str
    run_s: float
    stdout_bytes: bytes
    stderr_bytes: bytes
    truncated: bool  # more output came than was kept, or some was lost before it was read

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode("utf-8", "replace")


class Follower:
    """Follows one command across broken connections: which call comes next, what a line means, when to give up.

    A start is repeated with the same id (the server then attaches), a stream is taken up at the byte where it broke and only
    while the workspace is at the same generation, so that nothing runs twice, no byte comes twice, and nothing is woken.
    """

    def __init__(self, ref: str, exec_id: str, start: public.StartExec | None, key: str | None = None) -> None:
        self.ref = ref
        self.exec_id = exec_id
        self.pid: int | None = None
        self.generation: int | None = None
        self.outcome: public.ExecOutcome | None = None
        self.detached = False
        self.offsets = {"stdout": 0, "stderr": 0}
        self._start = start
        self._key = key
        self._seen = False  # a stream of this command was open at least once
        self._may_run = False  # it may have been started, though no answer said so
        self._breaks = 0

    @property
    def finished(self) -> bool:
        return self.outcome is not None or self.detached

    def next_call(self, wait_s: float | None) -> Call:
        if self._start is not None and not self._seen:
            return start_exec(self.ref, self._start.model_copy(update={"wait_s": wait_s}), self._key)
        return get(
            workspace_path(self.ref, "execs", self.exec_id, "output"),
            stdout_offset=self.offsets["stdout"],
            stderr_offset=self.offsets["stderr"],
            wait_s=wait_s,
            generation=self.generation,
        )

    def opened(self, headers: Mapping[str, str]) -> None:
        """A stream is open."""
        self._seen = True
        if public.GENERATION_HEADER in headers:
            self.generation = int(headers[public.GENERATION_HEADER])

    def feed(self, line: bytes) -> Output | None:
        """One line of the stream; raises the error that ended it."""
        event = public.ExecEvent.model_validate_json(line)
        self._breaks = 0
        if event.type == "started":
            self.pid = event.pid
        elif event.type == "exited":
            self.outcome = event.outcome
        elif event.type == "detached":
            self.detached = True
        elif event.type == "error":
            raise rebuild({"error": event.error.model_dump() if event.error else None}, 500)
        elif event.type == "output" and event.stream is not None:
            return self._output(event, event.stream)
        return None

    def _output(self, event: public.ExecEvent, stream: str) -> Output | None:
        seen = self.offsets[stream]
        data = event.payload[max(0, seen - event.offset) :]
        offset = max(seen, event.offset)
        self.offsets[stream] = offset + len(data)
        return Output(stream, data, offset, offset - seen) if data or offset > seen else None

    def broke(self, error: PerdureError) -> float:
        """Seconds to wait before the stream is taken up again; raises ``error`` when that is pointless."""
        self._may_run |= self._seen or error.ambiguous
        again = self._may_run and error.code in {"unavailable", "server_unreachable", "busy"}
        self._breaks += 1
        if isinstance(error, RateLimited) and self._breaks <= RECONNECTS:
            return welcome_s(error)
        if not (again or isinstance(error, ConnectionLost)) or self._breaks > RECONNECTS:
            if self._start is not None and self._key is None and self._may_run and isinstance(error, Unavailable):
                error.ambiguous, error.retryable = True, False  # whoever runs it once more runs another one
            raise error
        return delay_s(self._breaks)

    def still_running(self, wait_s: float | None) -> StillRunning:
        waited = "" if wait_s is None else f" after {wait_s:g} s"
        return StillRunning(
            f"The command {self.exec_id} still runs{waited}; it was not stopped.",
            hint="Attach to it with commands.attach(exec_id), or end it with commands.kill(exec_id).",
            exec_id=self.exec_id,
        )


class PtyFollower:
    """Follows one terminal across broken connections."""

    def __init__(self, ref: str, exec_id: str, offset: int) -> None:
        self.ref = ref
        self.exec_id = exec_id
        self.offset = offset
        self.lost = 0
        self.outcome: public.ExecOutcome | None = None
        self._generation: int | None = None
        self._breaks = 0

    def path(self) -> str:
        """Where to connect: at the byte where it broke, and not to a workspace that has slept meanwhile."""
        query = query_of({"stdout_offset": self.offset, "generation": self._generation})
        return Call("GET", workspace_path(self.ref, "execs", self.exec_id, "ws"), query).url

    def opened(self, headers: Mapping[str, str]) -> None:
        self._generation = int(headers[public.GENERATION_HEADER])

    def take(self, message: str | bytes) -> bytes:
        """One message: what is new of the output, or b"". Raises the error that ended the connection."""
        self._breaks = 0
        if isinstance(message, str):
            event = public.ExecEvent.model_validate_json(message)
            if event.type == "error":
                raise rebuild({"error": event.error.model_dump() if event.error else None}, 500)
            self.outcome = event.outcome if event.type == "exited" else None
            return b""
        _, offset, data = public.unpack_output(message)
        self.lost += max(0, offset - self.offset)
        fresh = data[max(0, self.offset - offset) :]
        self.offset = max(self.offset, offset + len(data))
        return fresh

    def broke(self, error: PerdureError) -> float:
        """Seconds to wait before it is connected to again; raises ``error`` when that is pointless."""
        self._breaks += 1
        again = error.code in {"connection_lost", "unavailable", "server_unreachable", "busy"}
        if not again or self._generation is None or self._breaks > RECONNECTS:
            raise error
        return delay_s(self._breaks)


class Collector:
    """Keeps what a command wrote, up to a limit per stream, and decodes it for callbacks without cutting characters."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._kept = {"stdout": bytearray(), "stderr": bytearray()}
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in self._kept}
        self._truncated = False

    def add(self, output: Output) -> str:
        """Keep it; returns the text that is complete now."""
        kept = self._kept[output.stream]
        room = max(0, self._limit - len(kept))
        kept += output.data[:room]
        self._truncated |= len(output.data) > room or output.gap > 0
        return self._decoders[output.stream].decode(output.data)

    def rest(self, stream: str) -> str:
        """What an unfinished character at the end decodes to."""
        return self._decoders[stream].decode(b"", final=True)

    def result(self, outcome: public.ExecOutcome) -> CommandResult:
        return CommandResult(
            exec_id=outcome.exec_id,
            end=outcome.end.value,
            exit_code=outcome.exit_code,
            signal=outcome.signal,
            detail=outcome.detail,
            run_s=outcome.run_s,
            stdout_bytes=bytes(self._kept["stdout"]),
            stderr_bytes=bytes(self._kept["stderr"]),
            truncated=self._truncated,
        )


def fresh_name() -> str:
    """A workspace name for a caller who gave none."""
    return f"ws-{secrets.token_hex(5)}"


def request_key() -> str:
    """What no other request is called."""
    return secrets.token_hex(16)


def checked(kind: type[public.Body], **values: Any) -> Any:
    """Build a request body; a mistake is the same error that the server would answer, found before anything is sent."""
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what = str(first["msg"]).removeprefix("Value error, ")
        raise InvalidRequest(f"The request is not valid: {where + ': ' if where else ''}{what}.") from error


def build_image(recipe: str | None, sources: Mapping[str, bytes], **values: Any) -> public.BuildImage:
    """The body of a build; ``sources`` as bytes."""
    encoded = {name: base64.b64encode(content).decode() for name, content in sources.items()}
    body: public.BuildImage = checked(public.BuildImage, recipe=recipe, sources=encoded, **values)
    return body
