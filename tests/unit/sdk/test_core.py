"""What the SDK decides, without I/O."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.config import Settings
from perdure.core.errors import (
    AlreadyExists,
    Busy,
    InvalidRequest,
    NoSpace,
    NotFound,
    PerdureError,
    QuotaExceeded,
    RateLimited,
    StaleGeneration,
    Unavailable,
    error_classes,
)
from perdure.sdk import _core
from perdure.sdk._core import Collector, Follower, Output
from perdure.sdk._feed import FeedReader
from perdure.sdk.errors import CallTimedOut, ConnectionLost, ServerUnreachable, rebuild
from perdure.wire import public


def _line(**fields: object) -> bytes:
    return public.ExecEvent.model_validate(fields).model_dump_json().encode()


def _output(offset: int, data: bytes, **more: object) -> bytes:
    return _line(type="output", stream="stdout", offset=offset, data=base64.b64encode(data).decode(), **more)


def test_every_error_survives_the_wire() -> None:
    for code, kind in error_classes().items():
        original = kind("What happened.", hint="What to do.")
        original.ambiguous = True
        again = rebuild({"error": original.public()}, kind.status)
        assert type(again) is kind, code
        assert again.public() == original.public()
    strange = rebuild({"error": {"code": "from_the_future", "message": "m", "gone": True}}, 500)
    assert (type(strange), strange.message, strange.gone) == (PerdureError, "m", True)
    assert "502" in rebuild("<html>", 502).message


@pytest.mark.parametrize(
    ("error", "repeatable", "repeats"),
    [
        (Busy("x"), False, True),
        (Unavailable("x"), False, True),
        (Unavailable("x", ambiguous=True), False, False),
        (NoSpace("x"), True, False),
        (AlreadyExists("x"), True, False),
        (ConnectionLost("x"), True, True),
        (ConnectionLost("x"), False, False),
        (ServerUnreachable("x"), True, False),
        (CallTimedOut("x"), True, False),
    ],
)
def test_only_safe_calls_are_repeated(error: PerdureError, repeatable: bool, repeats: bool) -> None:
    call = _core.Call("POST", "/", repeatable=repeatable)
    assert (_core.retry_after_s(call, error, 1) is not None) is repeats
    assert _core.retry_after_s(call, error, _core.RETRIES + 1) is None


def limited(retry_after: str | None) -> RateLimited:
    error = RateLimited("x")
    error.details = {} if retry_after is None else {"retry_after_s": retry_after}
    return error


@pytest.mark.parametrize(
    ("told", "repeatable", "left_s", "waits_s"),
    [
        ("2.5", True, 30.0, 2.5),
        ("2.5", True, 2.5, 2.5),
        ("2.5", True, 2.4, None),
        ("2.5", False, 30.0, None),
        (None, True, 30.0, 1.0),
        ("soon", True, 30.0, 1.0),
        ("0", True, 30.0, 0.05),
        ("-5", True, 30.0, 0.05),
        ("inf", True, 30.0, None),
    ],
)
def test_a_call_waits_for_its_turn_as_long_as_its_caller_does(
    told: str | None, repeatable: bool, left_s: float, waits_s: float | None
) -> None:
    call = _core.Call("GET", "/", repeatable=repeatable)
    for attempt in (1, 100):
        assert _core.retry_after_s(call, limited(told), attempt, left_s) == waits_s
    assert (_core.patience_s(None), _core.patience_s(3.0)) == (_core.PATIENCE_S, 3.0)


def test_a_quota_is_told_at_once_even_where_it_may_pass() -> None:
    error = QuotaExceeded("x")
    error.retryable = True
    assert _core.retry_after_s(_core.Call("GET", "/", repeatable=True), error, 1) is None


def test_a_command_under_the_rate_limit_is_started_when_its_turn_comes() -> None:
    follower = Follower("demo", "exe_0123456789", public.StartExec(exec_id="exe_0123456789", argv=["true"]))
    assert follower.broke(limited("1.5")) == 1.5
    assert follower.next_call(None).method == "POST"
    for _ in range(_core.RECONNECTS - 1):
        follower.broke(limited("1.5"))
    with pytest.raises(RateLimited):
        follower.broke(limited("1.5"))


@given(st.lists(st.binary(min_size=1).filter(lambda line: b"\n" not in line)), st.integers(1, 7))
def test_lines_do_not_depend_on_how_they_are_cut(lines: list[bytes], cut: int) -> None:
    data = b"".join(line + b"\n" for line in lines)
    buffer = bytearray()
    found = [line for at in range(0, len(data), cut) for line in _core.lines(buffer, data[at : at + cut])]
    assert (found, buffer) == (lines, b"")


@given(st.binary(), st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=20))
def test_overlapping_output_never_comes_twice(data: bytes, pieces: list[tuple[int, int]]) -> None:
    follower, seen = Follower("demo", "exe_1", None), bytearray()
    for start, length in [*pieces, (0, len(data))]:
        if start <= len(seen):  # a server never skips without saying so
            output = follower.feed(_output(start, data[start : start + length]))
            seen += output.data if output else b""
    assert bytes(seen) == data


def test_lost_bytes_are_counted() -> None:
    follower = Follower("demo", "exe_1", None)
    follower.feed(_output(0, b"abc"))
    assert follower.feed(_output(10, b"k", gap=7)) == Output("stdout", b"k", 10, 7)


def test_follower_starts_once_and_goes_on_where_it_broke() -> None:
    start = public.StartExec(exec_id="exe_0123456789", argv=["true"])
    follower = Follower("demo", "exe_0123456789", start)
    assert follower.next_call(5.0).method == "POST"
    follower.broke(ConnectionLost("before any answer"))
    again = follower.next_call(None)
    assert (again.method, (again.body or {})["exec_id"]) == ("POST", "exe_0123456789")
    follower.opened({public.GENERATION_HEADER: "4"})
    follower.feed(_line(type="started", exec_id="exe_0123456789", pid=7))
    follower.feed(_output(0, b"abc"))
    follower.broke(ConnectionLost("cut"))
    following = follower.next_call(None)
    assert (following.method, dict(following.query)) == (
        "GET",
        {"stdout_offset": "3", "stderr_offset": "0", "generation": "4"},
    )
    assert follower.pid == 7


def test_follower_gives_up_on_what_will_not_mend() -> None:
    follower = Follower("demo", "exe_1", None)
    with pytest.raises(ServerUnreachable):  # nothing was ever open: there is no server
        follower.broke(ServerUnreachable("x"))
    follower.opened({})
    assert follower.broke(ServerUnreachable("restarting")) > 0
    with pytest.raises(StaleGeneration):
        follower.broke(StaleGeneration("x"))
    with pytest.raises(ConnectionLost):
        for _ in range(_core.RECONNECTS + 1):
            follower.broke(ConnectionLost("x"))


def test_stream_that_ends_in_an_error_raises_it() -> None:
    error = {"code": "machine_died", "message": "The machine died.", "hint": "", "retryable": True}
    with pytest.raises(error_classes()["machine_died"], match="The machine died"):
        Follower("demo", "exe_1", None).feed(_line(type="error", error=error))


@given(st.text(), st.integers(1, 5))
def test_collector_decodes_without_cutting_characters(text: str, cut: int) -> None:
    data = text.encode("utf-8", "surrogatepass")
    collector = Collector(1 << 20)
    pieces = [collector.add(Output("stdout", data[at : at + cut], at)) for at in range(0, len(data), cut)]
    assert "".join([*pieces, collector.rest("stdout")]) == data.decode("utf-8", "replace")


def test_server_is_found_by_settings(tmp_path: object) -> None:
    settings = Settings(home=tmp_path, url=None, api_key=None)  # type: ignore[arg-type]
    local = _core.find_server(settings)
    assert (local.socket, local.headers) == (settings.api_socket, {})
    remote = settings.model_copy(update={"url": "http://host:7070/", "api_key": "pdk_secret"})
    target = _core.find_server(remote)
    assert (target.base_url, target.websocket_url, target.socket) == ("http://host:7070", "ws://host:7070", None)
    assert "pdk_secret" not in repr(target)
    settings.run_dir.mkdir()
    settings.api_key_file.write_text("pdk_file\n")
    assert _core.find_server(remote.model_copy(update={"api_key": None})).key == "pdk_file"
    with pytest.raises(InvalidRequest, match="is not one"):
        _core.find_server(settings.model_copy(update={"url": "host:7070"}))


@pytest.mark.parametrize("ref", ["", "a/b", "..", "."])
def test_refs_cannot_change_the_route(ref: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a workspace"):
        _core.workspace_path(ref)
    assert _core.workspace_path("demo@lost-1", "x?y") == "/v1/workspaces/demo%40lost-1/x%3Fy"


# -------------------------------------------------------------------------------------------------------------------- feed


def fed(reader: FeedReader, *lines: str) -> list[int]:
    found = [reader.feed(line.encode()) for line in lines]
    return [one.seq for one in found if one is not None]


def event_line(seq: int) -> str:
    body = {"seq": seq, "at": "2026-03-01T00:00:00Z", "kind": "running", "entry_seq": 1, "generation": 1, "body": {}}
    return "data: " + json.dumps(body)


def test_a_reader_of_the_feed_goes_on_after_what_it_has_heard() -> None:
    reader = FeedReader({"last": 5, "follow": True, "workspace": None}, ["a", "b"])
    assert reader.next_call().query == (("last", "5"), ("follow", "true"), ("kind", "a"), ("kind", "b"))
    assert fed(reader, "id: 40", ": heartbeat") == []
    assert dict(reader.next_call().query)["after"] == "40", "before its first event too"
    assert fed(reader, "id: 41", event_line(41), "id: 42\r", event_line(42)) == [41, 42]
    assert reader.next_call().query == (("follow", "true"), ("after", "42"), ("kind", "a"), ("kind", "b"))


def test_a_reader_of_the_feed_is_told_what_ended_it_and_gives_up() -> None:
    reader = FeedReader({}, ())
    with pytest.raises(NotFound, match="Gone"):
        fed(reader, "event: error", 'data: {"error": {"code": "not_found", "message": "Gone."}}')
    lost, away = ConnectionLost("Lost."), ServerUnreachable("Nobody.")
    with pytest.raises(ServerUnreachable):
        FeedReader({}, ()).broke(away)
    waits = [reader.broke(error) for error in (lost, away, lost)]
    assert waits == sorted(waits)
    with pytest.raises(ConnectionLost):
        for _ in range(_core.RECONNECTS + 1):
            reader.broke(lost)
