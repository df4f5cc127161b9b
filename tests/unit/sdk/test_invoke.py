"""Server-sent events out of pieces, and what an invocation sends."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.errors import InvalidRequest
from perdure.sdk._invoke import EventReader, InvokeEvent, InvokeResult, invocation

STREAM = (
    "\ufeff: a comment\n\ndata: one\n\nevent: step\r\nid: 7\r\ndata: two\r\ndata:  lines\r\n\r\ndata\rdata: é€\U0001f600\r\r"
    'retry: 10\nunknown: x\n\nevent: alone\n\ndata: {"a": 1}\n\ndata: not whole'
)
EVENTS = [
    InvokeEvent("one"),
    InvokeEvent("two\n lines", "step", "7"),
    InvokeEvent("\né€\U0001f600", "message", "7"),
    InvokeEvent('{"a": 1}', "message", "7"),
]


def read(pieces: list[bytes], *, is_stream: bool = True) -> list[InvokeEvent]:
    reader = EventReader(is_stream)
    return [event for piece in pieces for event in reader.feed(piece)] + [*reader.end()]


@given(st.lists(st.integers(0, len(STREAM.encode())), max_size=12))
def test_events_are_the_same_however_they_are_cut(cuts: list[int]) -> None:
    raw = STREAM.encode()
    places = [0, *sorted(cuts), len(raw)]
    assert read([raw[low:high] for low, high in pairwise(places)]) == EVENTS


def test_what_is_no_stream_is_one_event() -> None:
    assert read([b'{"a": ', b'"\xe2\x82', b'\xac"}'], is_stream=False) == [InvokeEvent('{"a": "€"}')]
    assert read([], is_stream=False) == [InvokeEvent("")]


def test_results_and_events_that_are_no_json_say_so() -> None:
    result = InvokeResult(200, "text/plain", b"\xffhello")
    assert result.text == "\ufffdhello" and result.ok
    for kind in (result, InvokeEvent("hello")):
        with pytest.raises(InvalidRequest, match="is not JSON"):
            kind.json()
    assert InvokeResult(200, "application/json", b"[1]").json() == InvokeEvent("[1]").json() == [1]


def test_an_invocation_is_sent_as_it_is_and_never_twice() -> None:
    call = invocation("demo", {"a": "é"}, {})
    assert (call.method, call.path, call.repeatable) == ("POST", "/v1/workspaces/demo/invocations", False)
    assert call.content is not None and json.loads(call.content) == {"a": "é"}
    assert dict(call.headers)["content-type"] == "application/json"
    raw = invocation("demo", b"\x00\xff", {"headers": {"Colour": "red"}, "session_id": "s"})
    assert raw.content == b"\x00\xff"
    assert dict(raw.headers) == {
        "content-type": "application/octet-stream",
        "accept": "application/json, text/event-stream, */*",
        "x-amzn-bedrock-agentcore-runtime-custom-colour": "red",
        "x-amzn-bedrock-agentcore-runtime-session-id": "s",
    }
