"""For how long a guest has been left alone is counted on the clock that the node was given, which is the server's (DESIGN D9)."""

from __future__ import annotations

from typing import Any, cast

from perdure.core.ids import ExecId
from perdure.machines.guestlink import GuestLink
from perdure.wire.guest.ops import Note
from tests.fakes.clock import FakeClock


def test_idle_time_is_the_given_clocks() -> None:
    clock = FakeClock()
    link = GuestLink(cast(Any, None), clock=clock)
    assert link.activity().idle_for_s == 0.0
    clock.advance(899.5)
    assert link.activity().idle_for_s == 899.5
    link._note_started(ExecId("exe_1"))
    assert link.activity().running_execs == 1
    link._on_note({"ev": Note.EXEC_ENDED, "exec_id": "exe_1"})
    assert (link.activity().running_execs, link.activity().idle_for_s) == (0, 0.0), "its end is use"
    clock.advance(3.0)
    assert link.activity().idle_for_s == 3.0
