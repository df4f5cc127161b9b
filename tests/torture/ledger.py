"""What callers were told, in a file that outlives the process that told them.

Each line is written before the caller would know, or, for a wish, before it is carried out: after a crash the file says what must
be there, what may be, and what may be gone.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Facts:
    """One workspace. ``allowed``: values it may wake with. ``captured``: those that its head may hold, to which it goes back when
    its machine is lost. ``last``: the newest acknowledged one, which must be somewhere."""

    allowed: set[int] = field(default_factory=set)
    captured: set[int] = field(default_factory=set)
    last: int = 0
    generation: int = 0
    is_doomed: bool = False  # its deletion, or its promotion into its parent, was asked for

    @property
    def is_known(self) -> bool:
        """Whether a caller was told of it."""
        return bool(self.allowed)


class Ledger:
    """Read at the begin of a life; ``note`` appends."""

    def __init__(self, path: Path) -> None:
        self.facts: dict[str, Facts] = {}
        self.snapshots: dict[str, set[int]] = {}  # of every acknowledged one, the values that may be in it
        self.named: dict[str, tuple[str, str]] = {}  # snapshot id -> workspace and name: retention does not take these
        self.values = 0
        if path.exists():
            for line in path.read_bytes().splitlines():
                self._apply(json.loads(line))
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def note(self, kind: str, workspace: str, **body: Any) -> None:
        line = {"kind": kind, "workspace": workspace, **body}
        os.write(self._fd, json.dumps(line).encode() + b"\n")  # one write: a killed process leaves whole lines
        self._apply(line)

    def _apply(self, line: dict[str, Any]) -> None:
        facts = self.facts.setdefault(line["workspace"], Facts())
        match line["kind"]:
            case "born":
                facts.allowed, facts.captured = set(line["values"]), set(line["values"])
                facts.last = min(line["values"])
            case "putting":
                facts.allowed.add(line["value"])
                self.values = max(self.values, line["value"])
            case "put":
                facts.last = line["value"]
            case "captured":
                self._captured(facts, line)
            case "seen":  # it was looked at, and this is where it goes on
                facts.allowed, facts.last = facts.captured | {line["value"]}, line["value"]
            case "moving":  # to the state of a snapshot or a branch; what it was is kept beside it
                facts.captured |= set(line["values"])
                facts.allowed |= facts.captured
            case "generation":
                facts.generation = line["generation"]
            case "deleting":
                facts.is_doomed = True
                self.named = {key: told for key, told in self.named.items() if told[0] != line["workspace"]}

    def _captured(self, facts: Facts, line: dict[str, Any]) -> None:
        facts.allowed = {value for value in facts.allowed if value >= facts.last}
        facts.captured = set(facts.allowed)
        self.snapshots[line["snapshot"]] = set(facts.allowed)
        if line.get("name"):
            self.named[line["snapshot"]] = (line["workspace"], line["name"])
