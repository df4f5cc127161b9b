"""A handle holds for one generation of one workspace of one tenant."""

from __future__ import annotations

import pytest

from perdure.api.handles import Handles
from perdure.core.errors import Forbidden
from perdure.core.ids import TenantId, WorkspaceId
from perdure.wire.node import Identity

HANDLES = Handles(b"k" * 32)


def identity(tenant: str = "ten_a", workspace: str = "ws_parent", generation: int = 3) -> Identity:
    return Identity(WorkspaceId(workspace), TenantId(tenant), generation, "host", "0" * 32)


def test_a_handle_holds_for_whom_it_was_issued_to() -> None:
    handle = HANDLES.issue(identity())
    assert handle.startswith("pdh_")
    HANDLES.check(identity(), handle)
    assert HANDLES.issue(identity()) == handle


@pytest.mark.parametrize(
    "other",
    [
        identity(workspace="ws_child"),
        identity(generation=2),
        identity(generation=4),
        identity(tenant="ten_b"),
        # the same characters, cut elsewhere
        identity(tenant="ten_", workspace="aws_parent"),
        identity(workspace="ws_parent3", generation=0),
    ],
)
def test_nobody_else_can_use_it_in_either_direction(other: Identity) -> None:
    with pytest.raises(Forbidden, match="was not issued to this generation"):
        HANDLES.check(other, HANDLES.issue(identity()))
    with pytest.raises(Forbidden, match="was not issued to this generation"):
        HANDLES.check(identity(), HANDLES.issue(other))


@pytest.mark.parametrize("handle", ["", "pdh_", "x" * 5000, "pdh_é\udc80"])
def test_what_is_no_handle_is_refused(handle: str) -> None:
    with pytest.raises(Forbidden):
        HANDLES.check(identity(), handle)


def test_another_key_issues_other_handles() -> None:
    with pytest.raises(Forbidden):
        Handles(b"l" * 32).check(identity(), HANDLES.issue(identity()))
