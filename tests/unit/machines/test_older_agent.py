"""What an agent that is older than the server says of operations that it does not know."""

from __future__ import annotations

import pytest

from perdure.core.errors import Conflict, InvalidRequest
from perdure.machines.guestlink_stream import error_of
from perdure.wire.guest.ops import UNKNOWN_CALL, UNKNOWN_OPERATION, Code


@pytest.mark.parametrize("refusal", [f"{UNKNOWN_OPERATION} 'watch'.", f"{UNKNOWN_CALL} 'program'."])
def test_it_is_named(refusal: str) -> None:
    error = error_of({"code": Code.INVALID, "message": refusal})
    assert isinstance(error, Conflict) and "older than the server" in error.message
    assert "disk-boot" in error.hint


@pytest.mark.parametrize("told", ["The agent knows no operatio", "The agent knows no user 'a'.", "An upload knows no 'x'."])
def test_other_mistakes_are_the_callers(told: str) -> None:
    error = error_of({"code": Code.INVALID, "message": told})
    assert isinstance(error, InvalidRequest) and error.message == told


def test_agents_that_are_out_there_begin_so() -> None:
    """What an agent said that was released is not ours to change any more."""
    assert (UNKNOWN_OPERATION, UNKNOWN_CALL) == ("The agent knows no operation", "The agent knows no call")
