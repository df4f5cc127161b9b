"""What the host believes of what a guest says about its program."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.clock import SystemClock
from perdure.core.errors import Conflict
from perdure.core.ids import ExecId
from perdure.machines.guestlink_program import GuestProgram, ping_of, status_of
from perdure.machines.guestlink_stream import LinkStream, error_of
from perdure.wire.guest.ops import UNKNOWN_CALL, UNKNOWN_OPERATION, Code
from perdure.wire.node import (
    LogRequest,
    PingStatus,
    ProgramAct,
    ProgramPing,
    ProgramSpec,
    ProgramState,
    ProgramStatus,
    Restart,
)

NAN, INFINITE = float("nan"), float("inf")
VALUE = st.sampled_from(
    [None, True, -1, 1 << 70, 1.5, NAN, INFINITE, "running", "x" * 900, "\ud800\n", [], ["a", 3], {}, {"A": 1}]
)
FIELDS = ["program", "problem", "state", "pid", "started_ns", "restarts", "failures", "retry_ms", "last", "log_start", "log_end"]
INNER = ["argv", "env", "cwd", "user", "port", "restart", "stop_grace_s", "code", "signal", "detail", "run_ms"]


@given(st.dictionaries(st.sampled_from(FIELDS), VALUE | st.dictionaries(st.sampled_from(INNER), VALUE)))
def test_no_answer_of_a_guest_does_harm(reply: dict[str, Any]) -> None:
    status = status_of(reply)
    assert isinstance(status, ProgramStatus) and status.log_end >= 0 and status.failures >= 0
    assert status.problem.isprintable()
    assert status.spec is None or 1 <= status.spec.port <= 65535


def test_a_true_answer_is_taken_as_it_is() -> None:
    program = {"argv": ["a"], "env": {"B": "c"}, "cwd": "/", "user": "u", "port": 9, "restart": "never", "stop_grace_s": 2}
    last = {"code": 137, "signal": 9, "detail": "killed", "run_ms": 1500}
    status = status_of(
        {"program": program, "state": "backing-off", "pid": None, "restarts": 2, "failures": 1, "retry_ms": 700, "last": last}
    )
    assert status.spec is not None and (status.spec.port, status.spec.restart) == (9, Restart.NEVER)
    assert (status.state, status.retry_in_s, status.restarts) == (ProgramState.BACKING_OFF, 0.7, 2)
    assert status.last is not None and (status.last.exit_code, status.last.signal, status.last.run_s) == (137, 9, 1.5)


@pytest.mark.parametrize(
    "content", [b"", b"pong", b"[]", b"{}", b'{"status": "Unhealthy"}', b'{"status": ["Healthy"]}', b"[" * 9000]
)
def test_what_is_no_ping_is_none(content: bytes) -> None:
    assert ping_of(content, 8080) is None


@pytest.mark.parametrize("moment", [b"0", b"-1", b"1e400", b"NaN", b'"now"', b"true", b"null", b"9" * 400, b"5e9"])
def test_a_moment_that_cannot_be_is_none(moment: bytes) -> None:
    content = b'{"status": "HealthyBusy", "time_of_last_update": ' + moment + b"}"
    assert ping_of(content, 8080) == ProgramPing(PingStatus.HEALTHY_BUSY, 8080, None)


class OldAgent(GuestProgram):
    """A link to an agent that has never heard of programs."""

    async def _call(self, request: dict[str, Any], deadline_s: float | None = None) -> dict[str, Any]:
        raise error_of({"code": Code.INVALID, "message": f"{UNKNOWN_CALL} {request['op']!r}."})

    async def _open_stream(self, request: dict[str, Any]) -> LinkStream:
        raise error_of({"code": Code.INVALID, "message": f"{UNKNOWN_OPERATION} {request['op']!r}."})

    def _note_started(self, exec_id: ExecId) -> bool:
        raise AssertionError

    def _note_ended(self, exec_id: ExecId) -> None:
        raise AssertionError

    def _note_watched(self, exec_id: ExecId) -> None:
        raise AssertionError


async def test_an_agent_of_an_earlier_release_is_told_to_be_one() -> None:
    """(peers: row 20)"""
    link = OldAgent(1.0, SystemClock())
    calls = [link.program(), link.act_on_program(ProgramAct.START), link.set_program(None), link.set_program(ProgramSpec(("a",)))]
    for call in calls:
        with pytest.raises(Conflict, match="older than the server") as caught:
            await call
        assert "disk-boot" in caught.value.hint
    with pytest.raises(Conflict, match="older than the server"):
        _ = [chunk async for chunk in link.program_log(LogRequest())]
    assert await link.ping_program(1.0) is None
