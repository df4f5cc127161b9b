"""Token buckets: whatever comes, no more gets through than the rate allows, and who waits as told gets through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.access.buckets import Buckets, Rate, Sampler

RATES = st.builds(Rate, per_s=st.floats(0.01, 1000), burst=st.integers(1, 50))
GAPS = st.lists(st.floats(0, 20), min_size=1, max_size=40)


@given(RATES, GAPS, st.floats(0, 1e7))
def test_in_no_stretch_of_time_more_gets_through_than_burst_and_rate(rate: Rate, gaps: list[float], now: float) -> None:
    buckets, admitted = Buckets(rate), []
    for gap in gaps:
        now += gap
        if buckets.take("a", now) == 0.0:
            admitted.append(now)
    for first in range(len(admitted)):
        for last in range(first, len(admitted)):
            most = rate.burst + (admitted[last] - admitted[first]) * rate.per_s
            assert last - first + 1 <= most + 0.01


@given(RATES, GAPS, st.floats(0, 1e7))
def test_who_waits_as_long_as_told_gets_through_and_nobody_waits_for_nothing(rate: Rate, gaps: list[float], now: float) -> None:
    buckets = Buckets(rate)
    for gap in gaps:
        now += gap
        wait_s = buckets.take("a", now)
        if wait_s:
            assert wait_s <= 1 / rate.per_s + 1e-6
            now += wait_s
            assert buckets.take("a", now) == 0.0


def test_one_name_does_not_use_up_anothers() -> None:
    buckets = Buckets(Rate(1, 2))
    assert [buckets.take("a", 0) for _ in range(3)] == [0.0, 0.0, 1.0]
    assert buckets.take("b", 0) == 0.0


def test_a_clock_that_goes_back_gives_nothing() -> None:
    buckets = Buckets(Rate(1, 1))
    assert buckets.take("a", 100) == 0.0
    assert buckets.take("a", 0) == 1.0
    assert buckets.take("a", 100) == 1.0
    assert buckets.take("a", 101) == 0.0


def test_memory_is_bounded_and_those_that_are_used_stay() -> None:
    buckets = Buckets(Rate(0.001, 1), names_max=10)
    assert buckets.take("busy", 0) == 0.0
    for number in range(100):
        buckets.take(f"n{number}", 0)
        assert buckets.take("busy", 0) > 0
    assert len(buckets) == 10


def test_a_sampler_bounds_each_name_and_all_together() -> None:
    sampler = Sampler(Rate(1, 2), Rate(1, 5), names_max=100)
    assert [sampler.is_chosen("a", 0) for _ in range(4)] == [True, True, False, False]
    assert sum(sampler.is_chosen(f"n{number}", 0) for number in range(50)) == 3
    assert [sampler.is_chosen("a", 1), sampler.is_chosen("b", 1)] == [True, False]


@pytest.mark.parametrize("rate", [Rate(0, 1), Rate(1, 0.5)])
def test_a_rate_that_never_lets_anything_through_is_a_mistake(rate: Rate) -> None:
    with pytest.raises(AssertionError):
        Buckets(rate)
