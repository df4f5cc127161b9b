"""What an agent that is older than the server says of operations that it does not know."""

from __future__ import annotations

from perdure.core.errors import Conflict
from perdure.machines.guestlink_stream import error_of
from perdure.wire.guest.ops import UNKNOWN_OPERATION, Code


def test_it_is_named() -> None:
    error = error_of({"code": Code.INVALID, "message": f"{UNKNOWN_OPERATION} 'watch'."})
    assert isinstance(error, Conflict) and "older than the server" in error.message
