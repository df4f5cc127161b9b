"""What an API key may do: five scopes, of which some include others.

    admin ─┬─ operate ── invoke ── read
           └─ approve ── read

``read``     looks at records: workspaces, snapshots, threads, images. It wakes nothing and sees nothing that is inside.
``invoke``   uses workspaces that exist: wakes them, runs commands, reads and writes files, opens connections.
``operate``  decides about workspaces: makes, forks, rewinds, configures and deletes them and their snapshots.
``approve``  votes on approvals. Who operates cannot approve what it asked for itself, so neither includes the other.
``admin``    all of that, and the keys of its tenant. An admin of the default tenant is the server's operator too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum


class KeyScope(StrEnum):
    ADMIN = "admin"
    OPERATE = "operate"
    INVOKE = "invoke"
    APPROVE = "approve"
    READ = "read"


class KeyState(StrEnum):
    """``expired`` and ``revoked`` are final."""

    ACTIVE = "active"
    EXPIRED = "expired"
    REVOKED = "revoked"


_INCLUDES: Mapping[KeyScope, tuple[KeyScope, ...]] = {
    KeyScope.ADMIN: (KeyScope.OPERATE, KeyScope.APPROVE),
    KeyScope.OPERATE: (KeyScope.INVOKE,),
    KeyScope.INVOKE: (KeyScope.READ,),
    KeyScope.APPROVE: (KeyScope.READ,),
    KeyScope.READ: (),
}


def granted(scopes: Iterable[KeyScope]) -> frozenset[KeyScope]:
    """These and all that they include."""
    found: set[KeyScope] = set()
    waiting = list(scopes)
    while waiting:
        scope = waiting.pop()
        if scope not in found:
            found.add(scope)
            waiting += _INCLUDES[scope]
    return frozenset(found)
