"""How a stop of the server goes: told by it while it ends, read by ``perdure down``, which cannot ask it any more by then.

Kept in ``HOME/run/stop.json`` until the next start. It is news, not a record: what became of a workspace is in the database.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Left:
    """A workspace that the server did not put to sleep. ``lost``: what its memory held since its last snapshot is gone."""

    workspace_id: str
    name: str
    why: str
    lost: bool


@dataclass(frozen=True, slots=True)
class StopReport:
    """Names of workspaces: put to sleep by this stop, and still to come. ``troubles``: sentences about those that failed and are
    tried again."""

    pid: int = 0
    asleep: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()
    left: tuple[Left, ...] = ()

    def write(self, path: Path) -> None:
        """In one step: a reader finds this report or the one before. Raises OSError."""
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(replace(self, pid=os.getpid()))))
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path, pid: int) -> StopReport | None:
        """What the process ``pid`` has told last; None when it has told nothing that can be read."""
        try:
            found = json.loads(path.read_bytes())
            left = tuple(Left(**one) for one in found["left"])
            report = cls(found["pid"], tuple(found["asleep"]), tuple(found["waiting"]), tuple(found["troubles"]), left)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return report if report.pid == pid else None
