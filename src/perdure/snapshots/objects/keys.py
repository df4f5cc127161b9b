"""Keys of the store's scopes: encryption at rest per tenant, and shredding by throwing the key away.

A tenant's key is random and wrapped by a key derived from the master key, so that deleting the wrapped key is the end of all that
was sealed with it, wherever copies of the objects are; a key derived from the master key could be derived again.

With encryption, chunks are also named by a keyed hash: who reads the store, but has no key, cannot test whether a tenant has a
certain chunk. Without encryption names are plain SHA-256: the content lies open, so a keyed name would hide nothing, and would
make the data depend on a key. Images are shared across tenants, and neither encrypted nor keyed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from perdure.core.errors import AlreadyExists, Conflict, CorruptData, InvalidRequest, Shredded
from perdure.core.files import DISK, TEMPORARY, Disk, create_file, link, make_dir, remove, temporary_beside, write_file
from perdure.core.keys import KEY_BYTES, WRAPPED, derive
from perdure.wire.objects import IMAGES, Scope, check_scope

_NONCE_BYTES = 12
#: What lies in the place of a key that was thrown away.
GONE = b"shredded\n"


@dataclass(frozen=True, slots=True)
class ScopeKeys:
    """Both None where nothing is encrypted."""

    naming: bytes | None = None
    sealing: bytes | None = None

    def chunk_id(self, content: bytes | memoryview) -> bytes:
        """32 bytes that name this content within its scope."""
        if self.naming is None:
            return hashlib.sha256(content).digest()
        return hmac.digest(self.naming, content, "sha256")

    def sealer(self, what: str) -> AESGCM | None:
        """A cipher for one object, which nothing else is sealed with: its name is never used twice."""
        return None if self.sealing is None else AESGCM(derive(self.sealing, what))


PLAIN = ScopeKeys()


class Keyring(Protocol):
    def of(self, scope: Scope) -> ScopeKeys:
        """The keys of a scope, made when there are none yet. Raises Shredded when they were thrown away, and CorruptData."""
        ...

    @property
    def seals(self) -> bool:
        """Whether tenants have keys."""
        ...

    def shred(self, scope: Scope) -> None:
        """Throw a tenant's key away: all it has in the store can never be read again. Repeating it is fine. Raises Conflict where
        tenants have none."""
        ...


class PlainKeyring:
    """No encryption."""

    def of(self, scope: Scope) -> ScopeKeys:
        check_scope(scope)
        return PLAIN

    @property
    def seals(self) -> bool:
        return False

    def shred(self, scope: Scope) -> None:
        raise Conflict(f"Nothing of {check_scope(scope)} is sealed, so there is no key that could be shredded.")


class TenantKeyring:
    """A directory with one wrapped key per tenant.

    Back it up with the master key, and expire old backups of it: a shredded tenant is gone when the last copy of its key is.
    """

    def __init__(self, directory: Path, master: bytes, disk: Disk = DISK) -> None:
        if len(master) < KEY_BYTES:
            raise InvalidRequest(f"The master key has {len(master)} bytes; {KEY_BYTES} are needed.")
        self._directory = directory
        self._wrapping = AESGCM(derive(master, "store tenant-keys"))
        self._disk = disk
        self._known: dict[Scope, ScopeKeys] = {}
        make_dir(directory, mode=0o700, disk=disk)

    def of(self, scope: Scope) -> ScopeKeys:
        if check_scope(scope) == IMAGES:
            return PLAIN
        if scope not in self._known:
            self._known[scope] = self._read(scope)
        return self._known[scope]

    def mark(self, scope: Scope) -> str | None:
        """Tells whether a scope's key is the same one as another node's, and nothing about it. Raises what ``of`` does."""
        sealing = self.of(scope).sealing
        return None if sealing is None else hashlib.sha256(derive(sealing, "store key-mark")).hexdigest()[:32]

    @property
    def seals(self) -> bool:
        return True

    def shred(self, scope: Scope) -> None:
        """The key's place is taken by a mark, so that no new key is made for a tenant whose content must stay unreadable."""
        if check_scope(scope) == IMAGES:
            raise InvalidRequest("Images have no key that could be shredded.", hint="Remove the image instead.")
        write_file(self._path(scope), GONE, mode=0o600, disk=self._disk)
        for left in self._directory.glob(f"{TEMPORARY}{scope}.key-*"):
            remove(left, disk=self._disk)  # a process that died while it made the key left a copy
        self._known.pop(scope, None)

    def _path(self, scope: Scope) -> Path:
        return self._directory / f"{scope}.key"

    def _read(self, scope: Scope) -> ScopeKeys:
        path = self._path(scope)
        try:
            stored = path.read_bytes()
        except FileNotFoundError:
            self._make(scope)
            stored = path.read_bytes()
        if stored == GONE:
            raise Shredded(
                f"The key of tenant {scope} was shredded; nothing it stored can be read.", hint="There is no way back."
            )
        nonce = stored[len(WRAPPED) : len(WRAPPED) + _NONCE_BYTES]
        try:
            if not stored.startswith(WRAPPED):
                raise InvalidTag
            key = self._wrapping.decrypt(nonce, stored[len(WRAPPED) + _NONCE_BYTES :], scope.encode())
        except (InvalidTag, ValueError) as error:
            raise CorruptData(
                f"The key of tenant {scope} cannot be unwrapped: it is damaged, or was wrapped by another master key.",
                hint="Restore the key file, or the master key that belongs to it, from a backup.",
                internal=str(path),
            ) from error
        return ScopeKeys(derive(key, "store chunk-names"), derive(key, "store sealing"))

    def _make(self, scope: Scope) -> None:
        """A new key; whoever is first wins, and the others read that one."""
        path, nonce = self._path(scope), os.urandom(_NONCE_BYTES)
        temporary = temporary_beside(path)
        wrapped = WRAPPED + nonce + self._wrapping.encrypt(nonce, os.urandom(KEY_BYTES), scope.encode())
        create_file(temporary, wrapped, mode=0o600, disk=self._disk)
        try:
            link(temporary, path, disk=self._disk)
        except AlreadyExists:
            pass
        finally:
            remove(temporary, disk=self._disk)
