"""What a round is, what it may find, and the table of what fired."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from perdure.core.errors import PerdureError


class Violation(Exception):
    """An invariant does not hold. The sentence names what, and what was found in its place."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One round. ``fired``: the fault happened. ``detail`` says where, so that a seed and it are enough to look again. ``also``:
    points of the same source whose faults followed in this round, each with its recovery and all invariants."""

    point: str
    fired: bool
    violations: tuple[str, ...] = ()
    detail: str = ""
    also: tuple[str, ...] = ()


def told_by(error: Exception) -> tuple[str, ...]:
    """The sentence of a violation or of an error of the product; what nobody foresaw is a violation with its kind."""
    if isinstance(error, Violation | PerdureError):
        return (str(error) or repr(error),)
    return (f"{type(error).__name__}: {error}",)


def together(point: str, outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of a round for ``point`` in which these happened one after the other, each with its recovery."""
    own = next(one for one in outcomes if one.point == point)
    wrong = [one for one in outcomes if one.violations]
    return Outcome(
        point,
        own.fired,
        tuple(f"{one.point}: {what}" if one is not own else what for one in wrong for what in one.violations),
        "; ".join(one.detail for one in wrong or [own] if one.detail),
        tuple(one.point for one in outcomes if one is not own and one.fired),
    )


class Source(Protocol):
    """Makes rounds of some points. ``close`` leaves no process and no file."""

    points: Sequence[str]

    async def round(self, point: str) -> Outcome: ...

    async def close(self) -> None: ...


#: Each named point fires at least so often, if there are rounds enough.
GOAL = 3
#: So many are enough.
ROUNDS = 200
#: A point that has been tried so often and did not fire enough is left to chance.
TRIES_MAX = 12


@dataclass
class Table:
    """How often each named point was tried and fired, and what was found."""

    seed: int
    points: Sequence[str]
    rounds: int = 0
    tried: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    longest: str = "none"  # the point of the longest round
    longest_s: float = 0.0
    is_cut_off: bool = False  # somebody ended the run; the round that was under way does not count

    def add(self, outcome: Outcome, seconds: float = 0.0) -> None:
        self.rounds += 1
        if seconds > self.longest_s:
            self.longest, self.longest_s = outcome.point, seconds
        self.tried[outcome.point] += 1
        self.fired[outcome.point] += outcome.fired
        self.tried.update(outcome.also)
        self.fired.update(outcome.also)
        self.violations += [f"round {self.rounds}, {outcome.point} ({outcome.detail}): {what}" for what in outcome.violations]

    @property
    def faults(self) -> int:
        return self.fired.total()

    def rarest(self, goal: int) -> list[str]:
        """Points that have fired less than ``goal`` times; those that have fired least come first, of them those tried least."""
        rare = (point for point in self.points if self.fired[point] < goal)
        return sorted(rare, key=lambda point: (self.fired[point], self.tried[point]))

    def silent(self) -> list[str]:
        """Points that have fired too seldom: in a run of rounds enough, or although they were tried again and again."""
        is_enough = self.rounds >= min(ROUNDS, GOAL * len(self.points))
        rare = self.rarest(GOAL)
        return [point for point in rare if is_enough or (self.tried[point] >= TRIES_MAX and not self.fired[point])]

    def lines(self) -> list[str]:
        """The closing line, then the table."""
        head = f"rounds={self.rounds} faults={self.faults} violations={len(self.violations)} seed={self.seed}"
        return [head, *(f"{self.fired[point]:6}  {point}" for point in self.points)]
