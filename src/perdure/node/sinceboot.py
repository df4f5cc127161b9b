"""Which shared files were read, and found whole, since the host was booted: in a file, so that a restart of the server forgets
nothing, and all servers that share an image directory read them once.

A damaged disk shows when its bytes are read from it again, which is when the host has booted. Until then a start need not wait
for gigabytes; the background of each server reads them all the same (ADR 21).
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

from perdure.core import files
from perdure.core.errors import NoSpace
from perdure.snapshots.frozen import Identity

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SinceBoot:
    """Any number of processes may use one file; what two note at once may be lost, which costs another reading. Any thread."""

    def __init__(self, path: Path, boot_id: str | None = None) -> None:
        self._path = path
        self._boot_id = BOOT_ID.read_text().strip() if boot_id is None else boot_id
        self._one_notes = threading.Lock()

    def knows(self, path: Path, identity: Identity) -> bool:
        """Whether the file was whole and nobody has written to it since. A new link to it changes its last time alone."""
        return self._read().get(str(path)) == list(identity[:-1])

    def note(self, path: Path, identity: Identity) -> None:
        """It is whole."""
        with self._one_notes:
            known = {name: told for name, told in self._read().items() if Path(name).exists()}
            known[str(path)] = list(identity[:-1])
            try:
                files.make_dir(self._path.parent)
                files.write_file(self._path, json.dumps({"boot_id": self._boot_id, "whole": known}, indent=1).encode())
            except (OSError, NoSpace):
                return  # a directory that only others may write to, or a full disk: it is read once more after a restart

    def _read(self) -> dict[str, list[int]]:
        """By path: device, inode, size and time of the last change of content."""
        try:
            told = json.loads(self._path.read_bytes())
            return dict(told["whole"]) if told["boot_id"] == self._boot_id else {}
        except (OSError, ValueError, TypeError, KeyError):
            return {}
