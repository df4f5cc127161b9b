"""Following a terminal across broken connections, without I/O."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.errors import NotFound, PerdureError, StaleGeneration, Unavailable
from perdure.sdk._core import RECONNECTS, PtyFollower
from perdure.sdk.errors import ConnectionLost
from perdure.wire import public

HEADERS = {public.GENERATION_HEADER: "3"}


@given(st.sampled_from(["stdout", "stderr"]), st.integers(0, 2**63), st.binary())
def test_output_travels_with_its_stream_and_offset(stream: str, offset: int, data: bytes) -> None:
    packed = public.pack_output(stream, offset, data)  # type: ignore[arg-type]
    assert public.unpack_output(packed) == (stream, offset, data)


@pytest.mark.parametrize("message", [b"", b"\x01", b"\x01" + bytes(7), b"\x00" + bytes(8), b"\x03" + bytes(8)])
def test_what_is_no_output_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="not a message"):
        public.unpack_output(message)


@given(st.binary(min_size=1, max_size=60), st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=20))
def test_every_byte_comes_once_whatever_is_sent_again(whole: bytes, pieces: list[tuple[int, int]]) -> None:
    follower = PtyFollower("ws_1", "exe_1", 0)
    got = b""
    for wanted, size in pieces:
        start = min(wanted, follower.offset)  # a server goes on where it is asked to, or earlier
        got += follower.take(public.pack_output("stdout", start, whole[start : start + size]))
    assert got == whole[: follower.offset]
    assert follower.lost == 0


def test_what_is_not_kept_any_more_is_counted() -> None:
    follower = PtyFollower("ws_1", "exe_1", 10)
    assert follower.take(public.pack_output("stdout", 1000, b"late")) == b"late"
    assert (follower.lost, follower.offset) == (990, 1004)


def test_it_goes_on_at_the_byte_and_in_the_generation_where_it_broke() -> None:
    follower = PtyFollower("ws_1", "exe_1", 0)
    assert follower.path() == "/v1/workspaces/ws_1/execs/exe_1/ws?stdout_offset=0"
    follower.opened(HEADERS)
    follower.take(public.pack_output("stdout", 0, b"abc"))
    assert follower.path() == "/v1/workspaces/ws_1/execs/exe_1/ws?stdout_offset=3&generation=3"


@pytest.mark.parametrize(
    ("error", "again"),
    [(ConnectionLost("x"), True), (Unavailable("x"), True), (StaleGeneration("x"), False), (NotFound("x"), False)],
)
def test_what_may_pass_is_tried_again_and_what_will_not_is_raised(error: PerdureError, again: bool) -> None:
    follower = PtyFollower("ws_1", "exe_1", 0)
    with pytest.raises(type(error)):
        follower.broke(error)  # it was never connected: whoever asked hears why
    follower.opened(HEADERS)
    if not again:
        with pytest.raises(type(error)):
            follower.broke(error)
        return
    delays = [follower.broke(error) for _ in range(RECONNECTS - 1)]
    assert delays == sorted(delays) and delays[-1] <= 2
    with pytest.raises(type(error)):
        follower.broke(error)
    follower.take(public.pack_output("stdout", 0, b"a"))
    assert follower.broke(error) == 0.1, "what arrives ends the count"


def test_events() -> None:
    follower = PtyFollower("ws_1", "exe_1", 0)
    assert follower.take('{"type": "started", "pid": 7}') == b""
    assert follower.outcome is None
    with pytest.raises(StaleGeneration, match="It slept"):
        follower.take('{"type": "error", "error": {"code": "stale_generation", "message": "It slept."}}')
    follower.take('{"type": "exited", "outcome": {"exec_id": "exe_1", "end": "exited", "exit_code": 4}}')
    assert follower.outcome is not None and follower.outcome.exit_code == 4
