"""The master key, and the keys that are derived from it: one file to guard, one key for each purpose.

Derivation is HKDF with SHA-256 (RFC 5869) from the standard library; the purpose is its ``info``, so that keys of two purposes
tell nothing of each other. The file is made at first start with mode 0600. Whoever loses it loses what was signed with it, such
as handles that workspaces hold, and nothing else: no state is sealed with it so far.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from perdure.core import files
from perdure.core.errors import CorruptData, HostUnfit

KEY_BYTES = 32
_HASH_BYTES = hashlib.sha256().digest_size


def master_key(path: Path) -> bytes:
    """The key in ``path``, made when there is none yet. Raises HostUnfit when others can read it, CorruptData when it is none."""
    if not path.exists():
        files.make_dir(path.parent)
        files.write_file(path, os.urandom(KEY_BYTES), mode=0o600)
    if path.stat().st_mode & 0o077:
        raise HostUnfit(f"The master key {path} can be read by others.", hint=f"Run 'chmod 600 {path}'.")
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise CorruptData(
            f"The master key {path} has {len(key)} bytes instead of {KEY_BYTES}.",
            hint="Restore it from a backup, or remove it to have a new one made: what was signed with it then counts no more.",
        )
    return key


def derive(master: bytes, purpose: str, *, length: int = KEY_BYTES) -> bytes:
    """The key for one purpose, such as ``workspace-handle``."""
    return hkdf(master, b"perdure", purpose.encode(), length)


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    """RFC 5869 with SHA-256: extract, then expand to ``length`` bytes (at most 255 hashes)."""
    assert 0 < length <= 255 * _HASH_BYTES, "HKDF gives at most 255 hashes"
    pseudorandom = hmac.digest(salt or bytes(_HASH_BYTES), secret, "sha256")
    block, output = b"", b""
    for counter in range(1, -(-length // _HASH_BYTES) + 1):
        block = hmac.digest(pseudorandom, block + info + bytes([counter]), "sha256")
        output += block
    return output[:length]
