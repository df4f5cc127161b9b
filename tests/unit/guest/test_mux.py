"""The mux: order within a stream, windows, fairness, and a fresh start at every sync."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.wire.guest import EventKind, Mux, Role, WireMisuse
from perdure.wire.guest.frames import ANNOUNCE, FrameType, encode, encode_sync
from perdure.wire.guest.ops import STREAMS_MAX, WINDOW_MAX

NONCE = b"0123456789abcdef"
WINDOW = 4096


class Pair:
    """A host's and a guest's mux on a perfect wire."""

    def __init__(self, window: int = WINDOW) -> None:
        self.host, self.guest = Mux(Role.HOST, window=window), Mux(Role.GUEST, window=window)
        self.host.begin(NONCE)
        self.events: dict[str, list] = {"host": [], "guest": []}
        self.run()
        assert self.host.synced and self.guest.synced

    def run(self) -> None:
        while self.host.has_output or self.guest.has_output:
            self.events["guest"] += self.guest.receive(self.host.pull()) if self.host.has_output else []
            self.events["host"] += self.host.receive(self.guest.pull()) if self.guest.has_output else []

    def take(self, side: str) -> list[tuple[str, int, object]]:
        taken, self.events[side] = self.events[side], []
        return [(event.kind, event.stream, event.value) for event in taken]


def test_a_stream_opens_speaks_both_ways_and_is_forgotten_when_both_ended() -> None:
    pair = Pair()
    stream = pair.host.open({"op": "echo"})
    pair.host.send(stream, b"hello")
    pair.host.eof(stream)
    pair.run()
    assert pair.take("guest")[1:] == [("open", stream, {"op": "echo"}), ("data", stream, b"hello"), ("eof", stream, None)]
    pair.guest.accept(stream, {"yes": 1})
    pair.guest.send(stream, b"bye", 2)
    pair.guest.message(stream, {"ev": "done"})
    pair.guest.eof(stream)
    pair.run()
    expected = [
        ("accept", stream, {"yes": 1}),
        ("data", stream, b"bye"),
        ("message", stream, {"ev": "done"}),
        ("eof", stream, None),
    ]
    assert pair.take("host")[1:] == expected
    assert not pair.host.is_open(stream) and not pair.guest.is_open(stream)


def test_calls_are_answered_and_notes_arrive() -> None:
    pair = Pair()
    call = pair.host.call({"op": "ping"})
    pair.run()
    assert pair.take("guest")[-1] == ("call", call, {"op": "ping"})
    pair.guest.reply(call, {"ok": True})
    pair.guest.note({"ev": "x"})
    pair.run()
    assert pair.take("host")[1:] == [("reply", call, {"ok": True}), ("note", 0, {"ev": "x"})]


def test_a_sender_stops_at_the_window_and_goes_on_with_credit() -> None:
    pair = Pair()
    stream = pair.host.open({})
    pair.host.send(stream, b"a" * (3 * WINDOW))
    pair.host.message(stream, {"after": True})
    pair.run()
    arrived = sum(len(value) for kind, _, value in pair.take("guest") if kind == EventKind.DATA)
    assert arrived == WINDOW
    assert pair.host.room(stream) == -2 * WINDOW
    pair.guest.consumed(stream, WINDOW // 4 - 1)
    pair.run()
    assert pair.take("guest") == []  # credit is given in quarters of a window, not in crumbs
    pair.guest.consumed(stream, 1)
    pair.run()
    assert sum(len(value) for _, _, value in pair.take("guest")) == WINDOW // 4
    pair.guest.consumed(stream, WINDOW)
    pair.run()
    pair.guest.consumed(stream, WINDOW)
    pair.run()
    assert pair.take("guest")[-1] == ("message", stream, {"after": True})


def test_only_a_host_gets_a_larger_window_for_the_asking() -> None:
    pair = Pair()
    asked = {"window": 2 * WINDOW}
    for end, other, room in ((pair.host, pair.guest, 2 * WINDOW), (pair.guest, pair.host, WINDOW)):
        stream = end.open(asked)
        pair.run()
        assert (end.room(stream), other.room(stream)) == (room, room)


@pytest.mark.parametrize("asked", ["much", -1, 1 << 62, True, None])
def test_a_window_that_is_none_or_too_large_is_cut(asked: object) -> None:
    pair = Pair()
    stream = pair.host.open({"window": asked})
    pair.run()
    assert pair.guest.room(stream) == pair.host.room(stream) == (WINDOW_MAX if asked == 1 << 62 else WINDOW)


def test_data_beyond_the_window_resets_the_stream() -> None:
    pair = Pair()
    stream = pair.host.open({})
    pair.run()
    pair.take("guest")
    events = pair.guest.receive(encode(FrameType.DATA, stream, bytes(WINDOW)) + encode(FrameType.DATA, stream, b"x"))
    assert [event.kind for event in events] == [EventKind.DATA, EventKind.RESET]
    pair.run()
    assert pair.take("host")[-1][0] == EventKind.RESET


def test_one_stream_does_not_starve_another() -> None:
    pair = Pair(window=1 << 20)
    bulk, small = pair.host.open({}), pair.host.open({})
    pair.run()
    pair.host.send(bulk, bytes(900_000))
    pair.host.send(small, b"quick")
    first = pair.guest.receive(pair.host.pull(100_000))
    assert (small, b"quick") in [(event.stream, event.value) for event in first]


def test_a_refused_stream_tells_why_and_drops_what_was_queued() -> None:
    pair = Pair()
    stream = pair.guest.open({"op": "egress"})
    pair.guest.send(stream, b"early")
    pair.run()
    pair.host.reset(stream, "forbidden", "no")
    pair.run()
    assert pair.take("guest")[-1] == ("reset", stream, {"code": "forbidden", "message": "no"})
    pair.guest.send(stream, b"late")  # nothing happens
    assert not pair.guest.has_output


def test_a_sync_forgets_streams_calls_and_queued_bytes() -> None:
    pair = Pair()
    stream = pair.host.open({"op": "old"})
    pair.run()
    pair.guest.send(stream, b"stale")
    pair.host.begin(b"another-nonce-!!")
    pair.run()
    assert pair.take("guest")[-1] == ("sync", 0, b"another-nonce-!!")
    assert pair.take("host")[-1] == ("sync", 0, b"another-nonce-!!")
    assert not pair.guest.is_open(stream) and not pair.host.is_open(stream)


def test_the_host_ignores_what_comes_before_its_own_nonce() -> None:
    host = Mux(Role.HOST)
    host.begin(NONCE)
    stale = encode_sync(b"someone-else-!!!") + encode(FrameType.NOTE, 0, b'{"ev":"old"}') + encode(FrameType.DATA, 1, b"x")[:7]
    assert host.receive(stale) == []
    assert [event.kind for event in host.receive(encode_sync(NONCE))] == [EventKind.SYNC]


def test_an_agent_that_starts_anew_breaks_the_hosts_connection() -> None:
    pair = Pair()
    fresh = Mux(Role.GUEST)
    fresh.announce(ANNOUNCE)
    events = pair.host.receive(encode(FrameType.DATA, 2, b"half")[:9] + fresh.pull())
    assert [event.kind for event in events] == [EventKind.BROKEN]
    assert pair.host.receive(encode(FrameType.NOTE, 0, b"{}")) == []


def test_a_peer_cannot_open_streams_with_our_ids_or_without_end() -> None:
    pair = Pair()
    ours = pair.host.open({})
    pair.run()
    pair.take("host")
    assert pair.host.receive(encode(FrameType.OPEN, ours, b"{}") + encode(FrameType.OPEN, ours + 2, b"{}")) == []
    opens = b"".join(encode(FrameType.OPEN, 2 * number, b"{}") for number in range(1, STREAMS_MAX + 2))
    assert len(pair.host.receive(opens)) == STREAMS_MAX
    pair.run()
    assert pair.take("guest")[-1][2] is None or pair.host.has_output is False


@pytest.mark.parametrize("payload", [b"", b"[]", b"{", b"\xff", b"1", b"[" * 5000])
def test_a_message_that_is_no_json_object_resets_the_stream(payload: bytes) -> None:
    pair = Pair()
    stream = pair.guest.open({})
    pair.run()
    pair.take("host")
    assert [event.kind for event in pair.host.receive(encode(FrameType.MESSAGE, stream, payload))] == [EventKind.RESET]


def test_sending_after_the_end_is_a_programming_error() -> None:
    pair = Pair()
    stream = pair.host.open({})
    pair.host.eof(stream)
    with pytest.raises(WireMisuse):
        pair.host.send(stream, b"x")


@given(
    st.lists(st.tuples(st.sampled_from(["host", "guest"]), st.integers(0, 3), st.binary(max_size=900)), max_size=30),
    st.lists(st.integers(1, 700), min_size=1, max_size=20),
)
@settings(max_examples=150)
def test_every_interleaving_delivers_each_stream_in_order(sends: list, cuts: list[int]) -> None:
    pair = Pair(window=600)
    muxes = {"host": pair.host, "guest": pair.guest}
    streams = [pair.host.open({}), pair.host.open({}), pair.guest.open({}), pair.guest.open({})]
    pair.run()
    sent: dict = defaultdict(bytes)
    got: dict = defaultdict(bytes)
    wires = {"host": b"", "guest": b""}
    for side, index, data in sends:
        muxes[side].send(streams[index], data)
        sent[side, streams[index]] += data
    turn = 0
    while any(mux.has_output for mux in muxes.values()) or any(wires.values()):
        for side, other in (("host", "guest"), ("guest", "host")):
            wires[side] += muxes[side].pull(500)
            size = cuts[turn % len(cuts)]
            turn += 1
            chunk, wires[side] = wires[side][:size], wires[side][size:]
            for event in muxes[other].receive(chunk):
                if event.kind == EventKind.DATA:
                    got[side, event.stream] += event.value
                    muxes[other].consumed(event.stream, len(event.value))
    assert {key: value for key, value in got.items() if value} == {key: value for key, value in sent.items() if value}
