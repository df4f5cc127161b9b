"""How far a guest steps its clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from perdure.guest.repair import clock_step_ns

MS = 1_000_000
delays = st.integers(0, 500 * MS)


@given(st.integers(-(10**18), 10**18), delays, delays, delays)
def test_the_error_is_never_more_than_the_stated_uncertainty(offset: int, there: int, back: int, second: int) -> None:
    """``offset``: how far the host is ahead. First exchange takes there + back, the wake's own message ``second``."""
    stamped = 5 * 10**17  # guest time in the first exchange
    low, high = stamped + offset - there - stamped, stamped + offset + back - stamped
    now = stamped + 10**9
    host = now + offset - second
    step, uncertainty = clock_step_ns({"host_ns": host, "lo_ns": low, "hi_ns": high}, now)
    assert abs(step - offset) <= uncertainty + 1
    assert uncertainty <= (there + back) // 2 + 1


def test_with_one_message_only_the_lower_bound_is_the_estimate() -> None:
    assert clock_step_ns({"host_ns": 1_000 * MS}, 400 * MS) == (600 * MS, 0)


def test_bounds_that_contradict_each_other_still_give_a_step() -> None:
    assert clock_step_ns({"host_ns": 900, "lo_ns": 0, "hi_ns": 100}, 0) == (900, 0)
