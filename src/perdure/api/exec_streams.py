"""What all ways of following a command share: where to go on, server-sent events, and who reads what."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from dataclasses import dataclass

from pydantic import BaseModel, Field, JsonValue
from starlette.requests import HTTPConnection

from perdure.api.deps import Bundle, Bytes
from perdure.api.streams import NDJSON, Format, event_json
from perdure.core.errors import InvalidRequest, StaleGeneration
from perdure.wire import node, public
from perdure.workspaces.model import Awake, WorkspaceState

SSE = "text/event-stream"
#: The id of a stream's last event: a browser that connects again with it is told that there is no more.
_END = "end"
_EVENT_ID = re.compile(r"(\d{1,18})-(\d{1,18})")

# Attachments that a stream of this server reads. Stdin goes through them, since an unread one would hold the command up.
LiveHandles = dict[tuple[str, int, str], node.ExecHandle]


class Follow(BaseModel):
    """Where to go on."""

    stdout_offset: Bytes = 0
    stderr_offset: Bytes = 0
    wait_s: public.Seconds | None = None
    generation: int | None = Field(default=None, description="Refuse, and do not wake, if it is not running at this one.")


@dataclass(slots=True)
class Offsets:
    """How far a follower is, in bytes of each stream."""

    stdout: int = 0
    stderr: int = 0


#: What the description says of ``Last-Event-ID``; ``begin`` judges it.
EVENT_ID: dict[str, JsonValue] = {"pattern": f"^({_END}|[0-9]{{1,18}}-[0-9]{{1,18}})?$"}


def begin(last: str, query: Follow) -> Offsets | None:
    """Where a follower goes on: by ``Last-Event-ID``, or as the query says. None: it has had everything."""
    if not last:
        return Offsets(query.stdout_offset, query.stderr_offset)
    if last == _END:
        return None
    match = _EVENT_ID.fullmatch(last)
    if match is None:
        raise InvalidRequest(f"{last[:100]!r} is no event's id.", hint="Send the id of the last event that arrived, or none.")
    return Offsets(int(match[1]), int(match[2]))


def format_for(connection: HTTPConnection, offsets: Offsets) -> Format:
    """The format that a client asks for."""
    return _sse(offsets) if SSE in connection.headers.get("accept", "") else NDJSON


def _sse(at: Offsets) -> Format:
    """Server-sent events. Each id says how far the client is then, so that it can go on anywhere."""

    def encode(event: public.Answer) -> bytes:
        assert isinstance(event, public.ExecEvent)
        if event.type == "heartbeat":
            return b": heartbeat\n\n"
        if event.type == "output" and event.stream is not None:
            setattr(at, event.stream, event.offset + len(event.payload))
        event_id = _END if event.type == "exited" else f"{at.stdout}-{at.stderr}"
        return f"id: {event_id}\nevent: {event.type}\ndata: {event_json(event)}\n\n".encode()

    return Format(SSE, encode)


async def check_generation(call: Bundle, ref: str, generation: int | None) -> None:
    """Raises StaleGeneration, and wakes nothing, when a workspace does not run at the generation that a follower knows."""
    if generation is None:
        return
    now = await call.workspaces.get(call.ctx, ref)
    if now.generation != generation or now.state is not WorkspaceState.RUNNING:
        raise StaleGeneration(
            f"The command ran at generation {generation} of {now.name!r}, now {now.state.value} at {now.generation}.",
            hint="Attach to it without a generation: that wakes the workspace and goes on if its memory was kept.",
        )


def register(stack: AsyncExitStack, live: LiveHandles, awake: Awake, handle: node.ExecHandle) -> None:
    """Let stdin that comes by other calls go through this attachment while the stack is open."""
    key = (awake.workspace.id, awake.workspace.generation, handle.exec_id)
    live[key] = handle

    def forget() -> None:
        if live.get(key) is handle:
            del live[key]

    stack.callback(forget)
