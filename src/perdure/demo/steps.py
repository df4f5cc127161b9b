"""Steps of the demo: each is timed, said as it happens, and ends the demo when it fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from perdure.core.errors import PerdureError


class DemoFailed(PerdureError):
    """Something that must hold did not."""

    code = "demo_failed"
    default_hint = "This is a defect: 'perdure doctor' and the output above say more."


def expect(holds: object, sentence: str) -> None:
    """Raises DemoFailed with the sentence when it does not hold."""
    if not holds:
        raise DemoFailed(sentence)


@dataclass(slots=True)
class Step:
    name: str
    ok: bool = False
    seconds: float = 0.0
    detail: str = ""

    def public(self) -> dict[str, Any]:
        return {"name": self.name, "ok": self.ok, "seconds": round(self.seconds, 3), "detail": self.detail}


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the closing table. ``unit`` is ms, s or bytes."""

    name: str
    value: float
    unit: str
    cold_boots: float | None = None  # the same in cold boots, where it is a time

    def public(self) -> dict[str, Any]:
        ratio = round(self.cold_boots, 5) if self.cold_boots is not None else None
        return {"name": self.name, "value": round(self.value, 3), "unit": self.unit, "ratio_to_cold_boot": ratio}


@dataclass(slots=True)
class Steps:
    """``begun`` and ``ended`` are told of each step as it happens."""

    begun: Callable[[Step], None]
    ended: Callable[[Step], None]
    done: list[Step] = field(default_factory=list)

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        step = Step(name)
        self.done.append(step)
        self.begun(step)
        started = time.perf_counter()
        try:
            yield step
            step.ok = True
        except PerdureError as error:
            step.detail = error.message
            raise
        finally:
            step.seconds = time.perf_counter() - started
            self.ended(step)
