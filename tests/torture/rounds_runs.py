"""Servers of durable executions, killed at each named point of their service: rounds of their own, with the lives of
``runs_life``."""

from __future__ import annotations

from perdure.core.crashpoints import CrashPoint
from tests.torture.kill_rounds import Kills, Lived
from tests.torture.registry import Kind

NAMED = frozenset(point for point in CrashPoint if point.value.startswith("runs."))
LIVED = Lived("tests.torture.runs_life", "runs", "runs-kill", faults=10, rounds=2)

KINDS = (Kind("runs", lambda place: Kills(place, NAMED, LIVED), kills_at=NAMED),)
