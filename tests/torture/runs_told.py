"""What callers of durable executions were told, and what functions did, in a file that outlives the process that told them.

Each line is written before the caller would know, or, for a wish and for an effect, before it is carried out.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.runs.played import WAIT_S
from tests.torture.model import Violation

#: Between the clock of the host and what the database has told of its own.
CLOCKS_S = 1.0
FLAGS = {"stopping": "may_be_stopped", "stopped": "is_stopped", "deleting": "may_be_gone", "deleted": "is_gone"}


@dataclass
class Facts:
    """One execution. ``done``: steps whose ends were recorded."""

    name: str = ""
    effects: Counter[str] = field(default_factory=Counter)
    done: set[str] = field(default_factory=set)
    asked_at_s: float | None = None
    may_be_stopped: bool = False
    is_stopped: bool = False
    may_be_gone: bool = False
    is_gone: bool = False


class Told:
    """Read at the begin of a life; ``note`` appends."""

    def __init__(self, path: Path) -> None:
        self.facts: dict[str, Facts] = {}
        self.wished: set[str] = set()  # names of executions of which nobody was told
        self.shifted_s = 0.0
        if path.exists():
            for line in path.read_bytes().splitlines():
                self._apply(json.loads(line))
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def note(self, kind: str, execution: str = "", **body: Any) -> None:
        line = {"kind": kind, "id": execution, **body}
        os.write(self._fd, json.dumps(line).encode() + b"\n")  # one write: a killed process leaves whole lines
        self._apply(line)

    def now_s(self) -> float:
        return time.time() + self.shifted_s

    def of(self, execution: str) -> Facts:
        return self.facts.setdefault(execution, Facts())

    def _apply(self, line: dict[str, Any]) -> None:
        kind = line["kind"]
        if kind == "shifted":
            self.shifted_s += line["seconds"]
        elif kind == "beginning":
            self.wished.add(line["name"])
        elif kind in FLAGS:
            setattr(self.of(line["id"]), FLAGS[kind], True)
        else:
            self._tell(self.of(line["id"]), line)

    def _tell(self, facts: Facts, line: dict[str, Any]) -> None:
        match line["kind"]:
            case "begun":
                facts.name = line["name"]
                self.wished.discard(line["name"])
            case "effect":
                facts.effects[line["what"]] += 1
            case "done":
                facts.done.add(line["what"])
            case "waits":
                facts.asked_at_s = line["at_s"]

    # ------------------------------------------------------------------------------------------------------------ functions

    def effect(self, execution: str, what: str) -> None:
        """A step does what it is there for. Raises Violation when it must not."""
        facts, step = self.of(execution), what.partition(" ")[0]
        if step in facts.done:
            raise Violation(f"{execution}: the step {step!r} was done, and ran again")
        if step == "once" and facts.effects[what]:
            raise Violation(f"{execution}: the attempt {what!r} must run once, and ran again")
        self.note("effect", execution, what=what)

    def done(self, execution: str, step: str) -> None:
        if step not in self.of(execution).done:
            self.note("done", execution, what=step)

    def waits(self, execution: str) -> None:
        self.note("waits", execution, at_s=self.now_s())

    def woken(self, execution: str) -> None:
        asked_at_s = self.of(execution).asked_at_s
        waited_s = WAIT_S if asked_at_s is None else self.now_s() - asked_at_s
        if waited_s < WAIT_S - CLOCKS_S:
            raise Violation(f"{execution} was woken after {waited_s:.1f} of {WAIT_S} s")
