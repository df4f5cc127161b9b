"""Names that AWS's clients expect: a region, an account of twelve digits, functions by name or ARN. Nothing hangs on region and
account; who may do what is decided by the caller's key."""

from __future__ import annotations

import hashlib
import re

from perdure.core.errors import InvalidRequest
from perdure.core.ids import DEFAULT_TENANT
from perdure.runs.protocol.updates import FUNCTION_NAME

REGION = "us-east-1"
_FUNCTION = re.compile(FUNCTION_NAME)
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def account_of(tenant_id: str) -> str:
    """Twelve digits that are the same for a tenant each time."""
    if tenant_id == DEFAULT_TENANT:
        return "0" * 12
    return str(int.from_bytes(hashlib.sha256(tenant_id.encode()).digest()[:8]) % 10**12).zfill(12)


def function_name(text: str) -> str:
    """The function's own name in a name, a partial or a full ARN, with or without a version. Raises InvalidRequest."""
    match = _FUNCTION.fullmatch(text) if len(text) <= 256 else None
    name = match.group(11) if match else ""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{text[:100]!r} is not the name of a function.",
            hint="Names have letters, digits, dashes and underscores; at most 64.",
        )
    return name
