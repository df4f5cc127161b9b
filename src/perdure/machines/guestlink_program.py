"""The workspace's program, as the host sees it: what the supervisor in the guest says of it, its log, its ``/ping``."""

from __future__ import annotations

import asyncio
import json
import math
from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from perdure.core.errors import NotFound, PerdureError
from perdure.gateway.guesthttp import GuestConnection
from perdure.machines.guestlink_exec import integer, moment_s
from perdure.machines.guestlink_files import GuestFiles
from perdure.machines.guestlink_stream import LinkStream, clean
from perdure.wire.guest import EventKind
from perdure.wire.guest.ops import PROGRAM_FILE, Call, Op
from perdure.wire.node import (
    PROGRAM_PORT,
    ByteStream,
    LogChunk,
    LogRequest,
    PingStatus,
    PortLimits,
    PortRequest,
    ProgramAct,
    ProgramEnd,
    ProgramPing,
    ProgramSpec,
    ProgramState,
    ProgramStatus,
    Restart,
)

#: What the guest's supervisor may take to answer, beyond the usual: it waits for what it was asked to do.
_ACT_S = 15.0
_PING_BYTES = 16384
_PING = PortRequest("GET", b"/ping", ((b"accept", b"application/json"),), is_last=True)


class GuestProgram(GuestFiles):
    """The part of a link that is about the program."""

    @abstractmethod
    async def _call(self, request: dict[str, Any], deadline_s: float | None = None) -> dict[str, Any]:
        """Ask over the control channel, once the link is ready."""

    async def program(self) -> ProgramStatus:
        return await self._program("show")

    async def act_on_program(self, act: ProgramAct) -> ProgramStatus:
        status = await self._program(act.value)
        self._touch()
        if status.spec is None and not status.problem:
            raise NotFound(
                "No program is named in this workspace.", hint="Name one: perdure program set NAME -- COMMAND …, or in its image."
            )
        return status

    async def set_program(self, spec: ProgramSpec | None) -> ProgramStatus:
        await self._program("show")  # an agent that cannot run it is found out before anything is written
        if spec is None:
            with suppress(NotFound):  # nothing was named; what runs ends all the same
                await self.remove(PROGRAM_FILE)
        else:
            content = spec.to_file()
            await self.make_dir(PROGRAM_FILE.rpartition("/")[0])
            await self.write_file(PROGRAM_FILE, _once(content), mode=0o644)
        return await self._program(ProgramAct.RESTART.value)

    async def _program(self, do: str) -> ProgramStatus:
        return status_of(await self._call({"op": Call.PROGRAM, "do": do}, self._unresponsive_s + _ACT_S))

    async def program_log(self, request: LogRequest) -> AsyncIterator[LogChunk]:
        asked = {"op": Op.LOGS, "offset": request.offset, "tail": request.tail, "follow": request.follow}
        stream, accepted = await self._ask_only(asked)
        offset, gap = max(0, integer(accepted.get("offset"))), 0
        try:
            while (event := await stream.next_event()) is not None:
                if event.kind == EventKind.DATA:
                    yield LogChunk(offset, event.value, gap)
                    offset, gap = offset + len(event.value), 0
                elif event.value.get("ev") == "gap":
                    lost = max(0, integer(event.value.get("lost")))
                    offset, gap = offset + lost, gap + lost
        finally:
            await stream.close()

    # ---------------------------------------------------------------------------------------------------------- ping

    async def ping_program(self, deadline_s: float) -> ProgramPing | None:
        try:
            async with asyncio.timeout(deadline_s):
                spec = (await self.program()).spec
                return await self._ping(PROGRAM_PORT if spec is None else spec.port)
        except (PerdureError, TimeoutError):
            return None

    async def _ping(self, port: int) -> ProgramPing | None:
        """Over a stream that is not counted: to be asked whether it is busy is no use of a workspace."""
        stream: LinkStream = await self._open_stream({"op": Op.TCP, "port": port})
        try:
            await stream.accepted(self._unresponsive_s)
            return await ping_over(stream, port)
        finally:
            await stream.close()


async def ping_over(stream: ByteStream, port: int) -> ProgramPing | None:
    """Ask over a connection to the program's port, which it closes. Raises PortFailed for what is not HTTP."""
    answer = await GuestConnection(stream, PortLimits(head_bytes=_PING_BYTES)).request(_PING)
    try:
        content = b""
        async for piece in answer.body():
            content += piece
            if len(content) > _PING_BYTES:
                return None
    finally:
        await answer.aclose()
    return ping_of(content, port) if answer.status == 200 else None


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content


def ping_of(content: bytes, port: int) -> ProgramPing | None:
    """What a program's answer means; None when it is not the contract's."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        return None
    status = answer.get("status") if isinstance(answer, dict) else None
    if status not in list(PingStatus):
        return None
    updated = answer.get("time_of_last_update")
    known = isinstance(updated, int | float) and not isinstance(updated, bool) and 0 < updated < 4e9 and math.isfinite(updated)
    return ProgramPing(PingStatus(status), port, datetime.fromtimestamp(updated, UTC) if known else None)


def status_of(reply: dict[str, Any]) -> ProgramStatus:
    """A guest's account of its program. It may lie, so it is cut to size and made safe to show."""
    pid, retry_ms, state = reply.get("pid"), reply.get("retry_ms"), reply.get("state")
    started_ns = reply.get("started_ns")
    return ProgramStatus(
        spec=_spec(reply.get("program")),
        state=ProgramState(state) if state in list(ProgramState) else ProgramState.NONE,
        pid=None if pid is None else integer(pid),
        started_at=None if started_ns is None else datetime.fromtimestamp(moment_s(started_ns), UTC),
        restarts=max(0, integer(reply.get("restarts"))),
        failures=max(0, integer(reply.get("failures"))),
        retry_in_s=None if retry_ms is None else max(0, integer(retry_ms)) / 1000,
        last=_end(reply.get("last")),
        problem=clean(reply.get("problem")),
        log_start=max(0, integer(reply.get("log_start"))),
        log_end=max(0, integer(reply.get("log_end"))),
    )


def _spec(value: object) -> ProgramSpec | None:
    if not isinstance(value, dict):
        return None
    argv, env, port, grace = value.get("argv"), value.get("env"), value.get("port"), value.get("stop_grace_s")
    policy = value.get("restart")
    return ProgramSpec(
        argv=tuple(str(word) for word in argv) if isinstance(argv, list) else (),
        env={str(name): str(text) for name, text in env.items()} if isinstance(env, dict) else {},
        cwd=_text(value.get("cwd")),
        user=_text(value.get("user")),
        port=port if type(port) is int and 1 <= port <= 65535 else PROGRAM_PORT,
        restart=Restart(policy) if policy in list(Restart) else Restart.ALWAYS,
        stop_grace_s=float(grace) if isinstance(grace, int | float) and 0 <= grace <= 3600 else 0.0,
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _end(value: object) -> ProgramEnd | None:
    if not isinstance(value, dict):
        return None
    code, number = value.get("code"), value.get("signal")
    return ProgramEnd(
        exit_code=None if code is None else integer(code, -1),
        signal=None if number is None else integer(number),
        detail=clean(value.get("detail")),
        run_s=max(0, integer(value.get("run_ms"))) / 1000,
    )
