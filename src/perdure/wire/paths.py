"""Which paths may be asked for in a workspace: one rule for the API and for the link to the guest.

The guest resolves a path below the workspace's root by itself; this refuses early what could only mean something else.
"""

from __future__ import annotations

import posixpath

from perdure.core.errors import InvalidRequest, PathEscape
from perdure.wire.guest.ops import PATH_MAX
from perdure.wire.node import Beneath, Place


def guest_path(path: str) -> str:
    """The path unchanged: absolute, without NUL, never above the root. Raises InvalidRequest or PathEscape."""
    if not path.startswith("/"):
        raise InvalidRequest(f"The path {path!r} is not absolute.", hint="Paths in a workspace begin with '/'.")
    return _bounded(path)


def guest_place(place: Place) -> dict[str, str]:
    """A path, or one below a root, as a request to the guest names it. Raises as ``guest_path`` does."""
    if isinstance(place, str):
        return {"path": guest_path(place)}
    return {"root": guest_path(place.root), "path": _bounded(place.path)}


def place_of(root: str | None, path: str) -> Place:
    """Checked as ``guest_place`` does."""
    place: Place = path if root is None else Beneath(root, path)
    guest_place(place)
    return place


def shown(place: Place) -> str:
    """The path as the caller gave it."""
    return place if isinstance(place, str) else place.path


def parent(place: Place) -> Place:
    """The directory that a place is in."""
    if isinstance(place, str):
        return posixpath.dirname(place)
    return Beneath(place.root, posixpath.dirname(place.path.rstrip("/")))


def _bounded(path: str) -> str:
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
