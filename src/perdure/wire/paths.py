"""Which paths may be asked for in a workspace: one rule for the API and for the link to the guest.

The guest resolves a path below the workspace's root by itself; this refuses early what could only mean something else.
"""

from __future__ import annotations

from perdure.core.errors import InvalidRequest, PathEscape
from perdure.wire.guest.ops import PATH_MAX


def guest_path(path: str) -> str:
    """The path unchanged: absolute, without NUL, never above the root. Raises InvalidRequest or PathEscape."""
    if not path.startswith("/"):
        raise InvalidRequest(f"The path {path!r} is not absolute.", hint="Paths in a workspace begin with '/'.")
    if "\0" in path:
        raise InvalidRequest("The path contains NUL, which no file name can.", hint="Remove the NUL byte.")
    if len(path.encode("utf-8", "surrogateescape")) > PATH_MAX:
        raise InvalidRequest(f"The path is longer than {PATH_MAX} bytes.", hint="Use a shorter path.")
    depth = 0
    for part in path.split("/"):
        depth += {"": 0, ".": 0, "..": -1}.get(part, 1)
        if depth < 0:
            raise PathEscape(f"The path {path!r} leads out of the workspace.", hint="Paths are absolute in the workspace's root.")
    return path
