"""The operator's key: made at first start, kept in a 0600 file that CLI and SDK on this machine find."""

from __future__ import annotations

import os
from pathlib import Path

from perdure.access.service import new_secret
from perdure.core.errors import HostUnfit


def ensure_key_file(path: Path) -> str:
    """Return the key in ``path``, making the file when it is missing. Raises HostUnfit when others could read it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _read(path)
    key = new_secret()
    with os.fdopen(descriptor, "w") as file:
        file.write(key + "\n")
        file.flush()
        os.fsync(file.fileno())
    return key


def _read(path: Path) -> str:
    if path.stat().st_mode & 0o077:
        raise HostUnfit(f"The API key file {path} can be read by others.", hint=f"Run 'chmod 600 {path}'.")
    key = path.read_text().strip()
    if not key:  # a crash between creating and writing: nobody has this key yet
        path.unlink()
        return ensure_key_file(path)
    return key
