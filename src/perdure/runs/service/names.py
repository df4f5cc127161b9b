"""Names that AWS's clients expect: a region, an account of twelve digits. Nothing hangs on them: who may do what is decided by
the caller's key."""

from __future__ import annotations

import hashlib

from perdure.core.ids import DEFAULT_TENANT

REGION = "us-east-1"


def account_of(tenant_id: str) -> str:
    """Twelve digits that are the same for a tenant each time."""
    if tenant_id == DEFAULT_TENANT:
        return "0" * 12
    return str(int.from_bytes(hashlib.sha256(tenant_id.encode()).digest()[:8]) % 10**12).zfill(12)
