"""Samples to rows. Pure: the shape that ``perdure bench --json`` prints (DESIGN section 7)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def percentile(samples: Sequence[float], percent: float) -> float:
    """Nearest rank: a value that was measured, never one between two. Raises ValueError without samples."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Baseline:
    """What was measured beside a row, in the row's unit and in the same run."""

    what: str
    value: float


@dataclass(frozen=True, slots=True)
class Goal:
    """Upper bounds of a row. ``times``: of its baseline."""

    at_most: float | None = None
    times: float | None = None

    def text(self, unit: str) -> str:
        bounds = []
        if self.at_most is not None:
            bounds.append(f"<= {self.at_most:g} {unit}")
        if self.times is not None:
            bounds.append(f"<= {self.times:g} x baseline" if self.times >= 1 else f"<= 1/{1 / self.times:g} of baseline")
        return " and ".join(bounds)

    def met(self, value: float, baseline: Baseline | None) -> bool:
        """Raises ValueError for a goal relative to nothing."""
        if self.times is not None and baseline is None:
            raise ValueError("a goal in multiples needs a baseline")
        within = self.at_most is None or value <= self.at_most
        return within and (self.times is None or baseline is None or value <= self.times * baseline.value)


@dataclass(frozen=True, slots=True)
class Row:
    """``value`` is None where nothing could be measured; the note says why."""

    name: str
    value: float | None
    unit: str
    baseline: Baseline | None = None
    goal: Goal | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        if self.value is None or self.baseline is None or not self.baseline.value:
            return None
        return self.value / self.baseline.value

    @property
    def met(self) -> bool | None:
        return self.goal.met(self.value, self.baseline) if self.goal is not None and self.value is not None else None

    def public(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": round(self.value, 3) if self.value is not None else None,
            "unit": self.unit,
            "baseline": self.baseline.what if self.baseline else None,
            "baseline_value": round(self.baseline.value, 3) if self.baseline else None,
            "ratio": round(self.ratio, 4) if self.ratio is not None else None,
            "goal": self.goal.text(self.unit) if self.goal else None,
            "met": self.met,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class Against:
    """Samples of the same action without something, for a row's baseline."""

    what: str
    samples: Sequence[float]


def rows(
    name: str, samples: Sequence[float], unit: str, *, against: Against | None = None, goal: Goal | None = None, note: str = ""
) -> list[Row]:
    """p50 and p95, each beside the same percentile of the baseline. The goal is judged on the median."""

    def row(percent: int) -> Row:
        baseline = Baseline(against.what, percentile(against.samples, percent)) if against else None
        return Row(f"{name} p{percent}", percentile(samples, percent), unit, baseline, goal if percent == 50 else None, note)

    return [row(50), row(95)]
