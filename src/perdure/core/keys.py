"""The master key, and the keys that are derived from it: one file to guard, one key for each purpose.

Derivation is HKDF with SHA-256 (RFC 5869) from the standard library; the purpose is its ``info``, so that keys of two purposes
tell nothing of each other. The file is made at first start with mode 0600. Whoever loses it loses what was signed with it, such
as handles that workspaces hold, and what is sealed: the keys of tenants are wrapped with it, and all that they have in an object
store is sealed with those.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from perdure.core import files
from perdure.core.errors import CorruptData, HostUnfit

KEY_BYTES = 32
#: How the file of a tenant's key begins; one that was thrown away has another content.
WRAPPED = b"PDRKEY01"
_HASH_BYTES = hashlib.sha256().digest_size


def master_key(path: Path, wrapped: Path | None = None) -> bytes:
    """The key in ``path``, made when there is none yet.

    Raises HostUnfit when others can read it, CorruptData when it is none, or when it is missing although ``wrapped`` has keys of
    tenants, which a new one could not unwrap.
    """
    if not path.exists():
        if wrapped is not None and any(key.read_bytes().startswith(WRAPPED) for key in wrapped.glob("*.key")):
            raise CorruptData(
                f"The master key {path} is missing, and {wrapped} has keys of tenants that only it can unwrap.",
                hint=f"Restore {path} from a backup. Only if it is lost for good, move {wrapped} aside too.",
            )
        files.make_dir(path.parent)
        files.write_file(path, os.urandom(KEY_BYTES), mode=0o600)
    if path.stat().st_mode & 0o077:
        raise HostUnfit(f"The master key {path} can be read by others.", hint=f"Run 'chmod 600 {path}'.")
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise CorruptData(
            f"The master key {path} has {len(key)} bytes instead of {KEY_BYTES}.",
            hint="Restore it from a backup. Without it what is sealed in an object store or a backup cannot be read, and what "
            "was signed counts no more.",
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
