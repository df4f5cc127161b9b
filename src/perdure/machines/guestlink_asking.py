"""How a link asks something of a guest over the data channel, and what of that counts as activity."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import Any, Literal

from perdure.core import tracing
from perdure.core.clock import Clock
from perdure.core.errors import MachineFailed
from perdure.machines.guestlink_stream import LinkStream, Moved
from perdure.wire.guest.ops import Op

_COLLECTED_MAX = 64 * 1024 * 1024


class Asking(ABC):
    """Streams of the data channel, counted while they are open."""

    def __init__(self, unresponsive_s: float, clock: Clock) -> None:
        self._clock = clock
        self._unresponsive_s = unresponsive_s
        self._open: Counter[str] = Counter()
        self.moved = Moved()  # by callers of the workspace: what it sends out by itself is its egress
        self._last_activity = self._clock.monotonic()
        self._operations = 0

    @abstractmethod
    async def _open_stream(self, request: dict[str, Any]) -> LinkStream:
        """A new stream, once the link is ready."""

    def _touch(self) -> None:
        self._last_activity = self._clock.monotonic()
        self._operations += 1

    def _count(self, stream: LinkStream, kind: Literal["exec", "stream", "outbound"]) -> None:
        """Count a stream as activity until it is over, and its bytes if a caller opened it."""
        self._open[kind] += 1
        if kind != "outbound":
            stream.moved = self.moved
        self._touch()

        def over() -> None:
            self._open[kind] -= 1
            self._touch()

        stream.on_over.append(over)

    async def _ask(
        self, request: dict[str, Any], kind: Literal["exec", "stream"] = "stream"
    ) -> tuple[LinkStream, dict[str, Any]]:
        with tracing.span(f"guest.{request['op']}", perdure__exec=request.get("exec_id")):
            if request["op"] in (Op.EXEC, Op.PTY) and (trace := tracing.traceparent()):
                request = {**request, "trace": trace}  # of the call, not of the command: a repetition is the same command
            stream = await self._open_stream(request)
            self._count(stream, kind)
            return stream, await self._accepted(stream)

    async def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        """A short operation whose acceptance is its result."""
        stream, result = await self._ask_only(request)
        await stream.close()
        return result

    async def _ask_only(self, request: dict[str, Any]) -> tuple[LinkStream, dict[str, Any]]:
        """Ask for something that needs nothing more from this side: the stream is over when the answer is."""
        with tracing.span(f"guest.{request['op']}"):
            stream = await self._open_stream(request)
            self._count(stream, "stream")
            await stream.close_write()
            return stream, await self._accepted(stream)

    async def _accepted(self, stream: LinkStream) -> dict[str, Any]:
        try:
            return await stream.accepted(self._unresponsive_s)
        except BaseException:
            stream.abort("nobody waits for it any more")  # who asked was cancelled: it must not count as activity for ever
            raise

    async def _collect(self, request: dict[str, Any]) -> bytes:
        stream, _ = await self._ask_only(request)
        collected = bytearray()
        try:
            while data := await stream.read():
                collected += data
                if len(collected) > _COLLECTED_MAX:
                    raise MachineFailed("The workspace's listing is longer than 64 MiB.", hint="List a smaller directory.")
        finally:
            await stream.close()
        return bytes(collected)
