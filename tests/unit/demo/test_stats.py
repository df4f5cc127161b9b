"""Rows: percentiles are measured values, goals are judged against what they name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.demo.stats import Against, Baseline, Goal, Row, percentile, rows

SAMPLES = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


@given(SAMPLES, st.sampled_from([50, 95, 100]))
def test_a_percentile_was_measured_and_has_its_share_below(samples: list[float], percent: int) -> None:
    value = percentile(samples, percent)
    assert value in samples
    assert sum(sample <= value for sample in samples) >= percent / 100 * len(samples)
    assert sum(sample < value for sample in samples) < percent / 100 * len(samples)


def test_percentiles_of_twenty() -> None:
    samples = [float(n) for n in range(20, 0, -1)]
    assert (percentile(samples, 50), percentile(samples, 95)) == (10.0, 19.0)


def test_no_samples_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


@pytest.mark.parametrize(
    ("goal", "value", "base", "met", "text"),
    [
        (Goal(at_most=45), 45, None, True, "<= 45 ms"),
        (Goal(at_most=45), 45.1, None, False, "<= 45 ms"),
        (Goal(at_most=45, times=2.5), 40, 20, True, "<= 45 ms and <= 2.5 x baseline"),
        (Goal(at_most=45, times=2.5), 40, 10, False, "<= 45 ms and <= 2.5 x baseline"),
        (Goal(times=1 / 25), 4, 100, True, "<= 1/25 of baseline"),
        (Goal(times=1 / 25), 4.1, 100, False, "<= 1/25 of baseline"),
    ],
)
def test_a_goal_is_met_or_not(goal: Goal, value: float, base: float | None, met: bool, text: str) -> None:
    row = Row("x", value, "ms", Baseline("b", base) if base is not None else None, goal)
    assert (row.met, row.public()["goal"]) == (met, text)


def test_a_goal_relative_to_nothing_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="baseline"):
        _ = Row("x", 1, "ms", None, Goal(times=2)).met


def test_a_row_prints_what_scripts_rely_on_and_only_the_median_is_judged() -> None:
    p50, p95 = rows("wake", [10, 30], "ms", against=Against("bare", [5, 10]), goal=Goal(at_most=20))
    assert p50.public() == {
        "name": "wake p50", "value": 10, "unit": "ms", "baseline": "bare", "baseline_value": 5, "ratio": 2.0,
        "goal": "<= 20 ms", "met": True, "note": "",
    }  # fmt: skip
    assert (p95.public()["met"], p95.public()["ratio"], p95.public()["goal"]) == (None, 3.0, None)


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    row = Row("cold", None, "ms", Baseline("warm", 5), Goal(times=3), "it takes root")
    told = row.public()
    assert (told["value"], told["ratio"], told["met"], told["note"]) == (None, None, None, "it takes root")
