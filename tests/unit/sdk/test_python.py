"""What a cell's events are put together to, and how a cell is followed over broken connections."""

from __future__ import annotations

import base64

import pytest

from perdure.core.errors import Busy, KernelDied, PerdureError, RateLimited, StaleGeneration
from perdure.sdk._python import CellCollector, CellFollower, PythonOutput
from perdure.sdk.errors import ConnectionLost
from perdure.wire import public

EXEC = "exe_0123456789"


def event(kind: public.PythonEventType, **fields: object) -> public.PythonEvent:
    return public.PythonEvent.model_validate({"type": kind, "exec_id": EXEC, **fields})


def collected(*events: public.PythonEvent) -> CellCollector:
    collector = CellCollector(EXEC)
    for one in events:
        collector.add(one)
    return collector


def follower(**fields: object) -> CellFollower:
    return CellFollower("ws_1", public.RunPython.model_validate({"code": "1", "exec_id": EXEC, **fields}))


def line(kind: public.PythonEventType, **fields: object) -> bytes:
    return event(kind, **fields).model_dump_json(exclude_unset=True).encode()


def test_an_update_takes_the_place_of_what_it_updates() -> None:
    def shown(kind: public.PythonEventType, text: str, name: str | None) -> public.PythonEvent:
        return event(kind, data={"text/plain": text}, display_id=name)

    made = collected(
        shown("display_data", "a", "one"),
        shown("display_data", "b", "two"),
        shown("update_display_data", "c", "one"),
        shown("update_display_data", "d", "unheard of"),
    )
    assert [output.text for output in made.result().results] == ["c", "b", "d"]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (base64.b64encode(b"\x89PNG").decode(), b"\x89PNG"),
        (base64.encodebytes(b"x" * 100).decode(), b"x" * 100),  # as some libraries break its lines
        ("not base64!", None),
        ({"deep": 1}, None),
        (None, None),
    ],
)
def test_bytes_are_what_is_base64_and_nothing_else(value: object, found: bytes | None) -> None:
    assert PythonOutput({"image/png": value}).png == found
    assert PythonOutput({}).png is None


def test_kinds_are_read_as_they_are() -> None:
    data = {"text/html": "<b>", "image/svg+xml": "<svg>", "text/markdown": "*x*", "application/json": [1, None], "text/plain": 5}
    output = PythonOutput(data)
    assert (output.html, output.svg, output.markdown, output.json, output.text) == ("<b>", "<svg>", "*x*", [1, None], None)


def test_what_was_left_out_makes_a_result_truncated() -> None:
    assert collected(event("display_data", data={}, omitted=["image/png"]), event("done", status="ok")).result().truncated
    assert collected(event("done", status="ok", truncated=True)).result().truncated
    assert not collected(event("done", status="ok")).result().truncated


def test_a_broken_stream_goes_on_behind_the_last_event_at_the_same_generation() -> None:
    followed = follower(context="other")
    first = followed.next_call()
    assert (first.method, first.body) == ("POST", {"code": "1", "context": "other", "exec_id": EXEC})
    followed.broke(ConnectionLost("cut"))
    assert followed.next_call() == first, "whether it arrived is not known; sent again, it is the same cell"
    followed.opened("3")
    followed.feed(line("stream", stream="stdout", text="x", offset=70))
    followed.feed(line("heartbeat"))
    followed.broke(ConnectionLost("cut"))
    call = followed.next_call()
    assert (call.method, call.path) == ("GET", f"/v1/workspaces/ws_1/python/cells/{EXEC}")
    assert dict(call.query) == {"context": "other", "offset": "70", "generation": "3"}
    assert not followed.finished
    followed.feed(line("done", status="ok", offset=90))
    assert followed.finished


def test_what_ended_the_cell_is_raised_and_not_tried_again() -> None:
    followed = follower()
    followed.opened("1")
    failure = KernelDied("It died.").public()
    with pytest.raises(KernelDied) as caught:
        followed.feed(line("failed", failure=failure))
    for error in (caught.value, StaleGeneration("woken")):
        with pytest.raises(PerdureError) as again:
            followed.broke(error)
        assert again.value is error


def test_a_server_that_is_busy_is_asked_again_only_for_what_may_run_already() -> None:
    fresh = follower()
    with pytest.raises(Busy):
        fresh.broke(Busy("full"))
    begun = follower()
    begun.opened("1")
    assert begun.broke(Busy("full")) > 0


def test_patience_ends_and_says_that_it_may_have_run() -> None:
    followed = follower()
    followed.opened("1")
    with pytest.raises(ConnectionLost) as caught:
        for _ in range(100):
            followed.broke(ConnectionLost("cut"))
    assert caught.value.ambiguous and not caught.value.retryable


def test_too_many_calls_are_waited_for() -> None:
    error = RateLimited("too many")
    error.details = {"retry_after_s": "2.5"}
    assert follower().broke(error) == 2.5
