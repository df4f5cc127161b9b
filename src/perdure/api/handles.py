"""Handles: what a workspace may hold in place of a secret. Pure.

A handle is a MAC over the identity that the host gave to a machine: tenant, workspace (a branch is one), generation. It is
checked against the identity that the host has bound to the connection it comes over, never against what the guest says of itself.
So it is worth something in one generation of one workspace only: memory that a fork, a wake or a rewind has copied elsewhere
brings a handle there that is refused, and nobody needs to be told which handles have been given out.
"""

from __future__ import annotations

import hmac

from perdure.core import base64url
from perdure.core.errors import Forbidden
from perdure.wire.node import Identity

PREFIX = "pdh_"
PURPOSE = "workspace-handle"


class Handles:
    """``key`` is derived from the master key for ``PURPOSE``."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def issue(self, identity: Identity) -> str:
        """The handle of this generation; the same one every time."""
        parts = (identity.tenant_id, identity.workspace_id, str(identity.generation))
        message = b"".join(len(raw).to_bytes(4, "big") + raw for raw in (part.encode() for part in parts))
        return PREFIX + base64url.encode(hmac.digest(self._key, message, "sha256"))

    def check(self, identity: Identity, handle: str) -> None:
        """Raises Forbidden unless the handle is the one of this identity."""
        if not hmac.compare_digest(handle.encode("utf-8", "surrogatepass"), self.issue(identity).encode()):
            raise Forbidden(
                "This handle was not issued to this generation of this workspace.",
                hint="After a wake or a fork ask for a new one: GET /v1/workspace/handle.",
            )
