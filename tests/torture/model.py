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


class Source(Protocol):
    """Makes rounds of some points. ``close`` leaves no process and no file."""

    points: Sequence[str]

    async def round(self, point: str) -> Outcome: ...

    async def close(self) -> None: ...


@dataclass
class Table:
    """How often each named point was tried and fired, and what was found."""

    seed: int
    points: Sequence[str]
    rounds: int = 0
    tried: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.rounds += 1
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

    def lines(self) -> list[str]:
        """The closing line, then the table."""
        head = f"rounds={self.rounds} faults={self.faults} violations={len(self.violations)} seed={self.seed}"
        return [head, *(f"{self.fired[point]:6}  {point}" for point in self.points)]
