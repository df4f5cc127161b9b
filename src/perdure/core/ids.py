"""Typed ids: a short prefix that says what it names, then 26 sortable characters.

The characters are a UUIDv7 (48 bits of milliseconds, 74 of randomness) in lower-case Crockford base 32, so that ids sort by
creation time, are safe in file names, host names and URLs, and are never guessed.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from typing import NewType

from perdure.core.errors import InvalidRequest

TenantId = NewType("TenantId", str)
WorkspaceId = NewType("WorkspaceId", str)
SnapshotId = NewType("SnapshotId", str)
NodeId = NewType("NodeId", str)
ExecId = NewType("ExecId", str)
DiskId = NewType("DiskId", str)
SegmentId = NewType("SegmentId", str)
BaseId = NewType("BaseId", str)
RequestId = NewType("RequestId", str)
KeyId = NewType("KeyId", str)
WebhookId = NewType("WebhookId", str)
LinkId = NewType("LinkId", str)

DEFAULT_TENANT = TenantId("ten_default")

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_ID = re.compile(r"^(ten|ws|snp|nod|exe|exn|wrk|dsk|seg|bas|req|try|key|whk|msg|lnk)_[0-9a-z_]{1,40}")
#: Workspace names: DNS-label characters, so that a name can be a host name. ``@`` starts the part Perdure adds (``demo@lost-…``).
NAME = re.compile(r"^[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?(@[a-z0-9][a-z0-9-]{0,40})?$")
USER_NAME = re.compile(r"^[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?$")
SNAPSHOT_NAME = re.compile(r"^(?!snp_)[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")


def mint(prefix: str, *, now_ms: int) -> str:
    """A new id such as ``ws_01k…``; the caller wraps it in its NewType."""
    value = (now_ms & ((1 << 48) - 1)) << 80 | int.from_bytes(os.urandom(10))
    digits = []
    for _ in range(26):
        value, digit = divmod(value, 32)
        digits.append(_ALPHABET[digit])
    return f"{prefix}_{''.join(reversed(digits))}"


def keyed_exec(workspace_id: str, key: str) -> ExecId:
    """The id of the command that an idempotency key stands for in a workspace: whoever knows both knows it beforehand."""
    digest = hashlib.sha256(f"{workspace_id}\0{key}".encode("utf-8", "surrogateescape")).digest()
    return ExecId(f"exe_{base64.b32hexencode(digest[:20]).decode().lower()}")


def is_id(text: str, prefix: str) -> bool:
    """Whether ``text`` has the shape of an id of that kind (it may still name nothing)."""
    return text.startswith(prefix + "_") and _ID.fullmatch(text) is not None


def check_name(name: str, of: str = "workspace") -> str:
    """Return a user-given name or raise InvalidRequest with the rule it breaks. ``of`` is what it is to name, for the message."""
    if not USER_NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name!r} is not a {of} name.",
            hint="Use 1 to 50 lower-case letters, digits and dashes, starting and ending with a letter or digit.",
        )
    return name
