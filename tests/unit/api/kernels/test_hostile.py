"""What comes out of a workspace is an attacker's: whatever its Python says, the server says it in its own words or refuses it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from perdure.api.kernels import talk
from perdure.api.kernels.talk import Kernels
from perdure.api.streams import event_json
from perdure.core.errors import InvalidRequest, PerdureError, PythonFailed, PythonMissing, Unavailable
from perdure.core.ids import ExecId
from perdure.wire import node, public
from perdure.wire.node import ExecEnd

EXEC = ExecId("exe_0000000001")
STARTED = b'{"type": "started", "kernel": 1, "restarted": false}\n'
DONE = b'{"type": "done", "status": "ok", "execution_count": 1, "truncated": false}\n'


class Script:
    """A cell's command that writes what it is told to, and ends."""

    exec_id = EXEC

    def __init__(self, *pieces: bytes | tuple[int, bytes], exited: node.ExecExited | None = None, stderr: bytes = b"") -> None:
        self._pieces, self._exited, self._stderr = pieces, exited, stderr

    async def events(self) -> AsyncIterator[node.ExecEvent]:
        yield node.ExecStarted(EXEC, 1)
        if self._stderr:
            yield node.ExecOutput("stderr", 0, self._stderr)
        offset = 0
        for piece in self._pieces:
            gap, data = piece if isinstance(piece, tuple) else (0, piece)
            offset += gap
            yield node.ExecOutput("stdout", offset, data, gap)
            offset += len(data)
        yield self._exited or node.ExecExited(EXEC, ExecEnd.EXITED, 0, None)

    async def close(self) -> None:
        pass


async def said(*pieces: bytes | tuple[int, bytes], **fields: Any) -> list[public.PythonEvent]:
    kernels = Kernels(cast("node.Guest", None), lambda: EXEC)
    return [event async for event in kernels.events(cast("node.ExecHandle", Script(*pieces, **fields)), "default")]


@pytest.mark.parametrize(
    "line",
    [
        b"garbage",
        b"[]",
        b"5",
        b"{}",
        b'{"type": "failed-in-another-way"}',
        b'{"type": ["done"]}',
        b'{"type": "heartbeat"}'[:-1],
        b'{"type": "stream", "text": 5}',
        b'{"type": "stream", "text": "\\ud800"}',
        b'{"type": "display_data", "data": []}',
        b'{"type": "done", "status": "splendid"}',
        b'{"type": "started", "kernel": "first"}',
        b'{"type": "display_data", "data": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b"\xff\xfe",
    ],
)
async def test_what_is_not_understood_ends_the_cell_in_words(line: bytes) -> None:
    with pytest.raises(PythonFailed, match="not understood"):
        await said(STARTED + line + b"\n" + DONE)
    with pytest.raises(InvalidRequest, match="not a Python cell"):
        await said(line + b"\n" + DONE)


async def test_it_cannot_speak_in_the_servers_name() -> None:
    forged = {
        "type": "stream",
        "text": "x",
        "exec_id": "exe_other",
        "offset": 7,
        "failure": {"code": "x", "message": "y"},
        "z": 1,
    }
    (event, _) = await said(json.dumps(forged).encode() + b"\n" + DONE)
    assert (event.exec_id, event.failure, event.offset) == (EXEC, None, len(json.dumps(forged)) + 1)


async def test_every_event_is_one_line_of_json_whatever_is_in_it() -> None:
    data = {"application/json": {"none": None, "list": [1.5, "\u2028"]}, "text/plain": "\x00\n\x7f\U0001f600"}
    (event, _) = await said(json.dumps({"type": "display_data", "data": data}).encode() + b"\n" + DONE)
    line = event_json(event)
    assert "\n" not in line and json.loads(line)["data"] == data


async def test_numbers_that_json_lacks_do_no_harm() -> None:
    (event, _) = await said(b'{"type": "display_data", "data": {"application/json": [NaN, Infinity]}}\n' + DONE)
    assert json.loads(event_json(event))


async def test_lines_are_put_together_however_they_come() -> None:
    text = STARTED + b'{"type": "stream", "stream": "stdout", "text": "\xc3\xa9"}\n' + DONE
    whole = await said(text)
    assert [event.offset for event in whole] == [len(STARTED), len(text) - len(DONE), len(text)]
    for cut in range(1, len(text)):
        assert await said(text[:cut], text[cut:]) == whole


async def test_what_nobody_read_in_time_is_left_out_and_told() -> None:
    events = await said(STARTED, (1000, b'rest of a line"}\n' + DONE))
    assert [event.type for event in events] == ["started", "done"] and events[-1].truncated
    assert events[-1].offset == len(STARTED) + 1000 + len(b'rest of a line"}\n' + DONE)


async def test_a_line_without_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talk, "LINE_BYTES_MAX", 1000)
    with pytest.raises(PythonFailed, match="more than a cell may show"):
        await said(STARTED, *(b"x" * 100 for _ in range(20)))


@pytest.mark.parametrize(
    ("end", "signal", "kind", "words"),
    [
        (ExecEnd.NOT_STARTED, None, PythonMissing, "no such thing"),
        (ExecEnd.KILLED, 15, PythonFailed, "was killed"),
        (ExecEnd.LOST, None, PythonFailed, "not known"),
        (ExecEnd.SIGNALED, 14, Unavailable, "has not run"),
        (ExecEnd.EXITED, None, PythonFailed, "cannot pass cells"),
        (ExecEnd.OOM, 9, PythonFailed, "cannot pass cells"),
    ],
)
async def test_each_end_of_its_command_is_an_error_that_says_so(
    end: ExecEnd, signal: int | None, kind: type[PerdureError], words: str
) -> None:
    exited = node.ExecExited(EXEC, end, 1, signal, "there is no such thing")
    with pytest.raises(kind, match=words) as caught:
        await said(exited=exited, stderr=b"Traceback: \xff odd")
    assert type(caught.value) is kind and caught.value.message.endswith((".", "thing"))
    if words == "cannot pass cells":
        assert "odd" in caught.value.details["log"]


async def test_what_a_kernel_says_of_its_end_is_made_safe_to_show() -> None:
    line = json.dumps({"type": "died", "detail": "\x1b[31m" + "x" * 9000}).encode() + b"\n"
    with pytest.raises(PerdureError) as caught:
        await said(STARTED + line)
    assert "\x1b" not in caught.value.message and len(caught.value.message) < 700
