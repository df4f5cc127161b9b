"""Processes of the machine layer: output bounded, ends seen, nothing inherited."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from perdure.core.errors import DeadlineExceeded, HostUnfit
from perdure.machines import process
from perdure.machines.process import Child, Tail, Watched, wait_for_exit


async def test_output_and_status() -> None:
    status, output = await process.run(["sh", "-c", "echo out; echo err >&2; exit 3"], 30)
    assert status == 3
    assert output.splitlines() == ["out", "err"]


async def test_output_is_bounded_to_its_end() -> None:
    _, output = await process.run(["sh", "-c", "seq 1 20000"], 30, limit=100)
    assert len(output) <= 100
    assert output.endswith("20000")


async def test_a_program_that_is_missing() -> None:
    with pytest.raises(HostUnfit, match="no-such-program cannot be started"):
        await process.run(["no-such-program"], 30)


async def test_a_program_that_hangs() -> None:
    with pytest.raises(HostUnfit, match=r"did not end within 0\.1 seconds"):
        await process.run(["sleep", "600"], 0.1)


async def test_the_environment_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_SECRET", "do not pass on")
    _, output = await process.run(["env"], 30)
    assert "SECRET" not in output
    assert "PATH=" in output


async def test_descriptors_are_passed_only_when_named() -> None:
    read_end, write_end = os.pipe()
    try:
        _, output = await process.run(
            ["sh", "-c", f"ls /proc/self/fd; echo through >/proc/self/fd/{write_end}"], 30, fds=[write_end]
        )
        numbers = output.split()
        assert str(write_end) in numbers
        assert str(read_end) not in numbers
        assert os.read(read_end, 100) == b"through\n"
    finally:
        os.close(read_end)
        os.close(write_end)


async def test_a_guests_words_cannot_drive_a_terminal() -> None:
    read_end, write_end = os.pipe()
    tail = Tail(read_end, 1000)
    os.write(write_end, b"\x1b[2Jcleared\r\nsecond \xff\n")
    tail.drain()
    os.close(write_end)
    await tail.ended
    assert tail.text() == "\N{REPLACEMENT CHARACTER}[2Jcleared\nsecond \N{REPLACEMENT CHARACTER}"


async def test_a_child_that_is_killed_is_reaped() -> None:
    ended = asyncio.Event()
    child = Child(["sleep", "600"], fds=[], on_exit=ended.set)
    assert child.watched.is_alive()
    assert child.status is None
    child.watched.kill()
    await child.wait(30)
    async with asyncio.timeout(30):
        await ended.wait()
    assert child.status == -signal.SIGKILL
    assert not child.watched.is_alive()
    child.watched.kill()
    assert not Path(f"/proc/{child.pid}").exists()


async def test_waiting_has_a_deadline() -> None:
    child = Child(["sleep", "600"], fds=[], on_exit=lambda: None)
    try:
        with pytest.raises(DeadlineExceeded, match="still there"):
            await wait_for_exit(child.watched, 0.05)
    finally:
        child.watched.kill()
        await child.wait(30)


async def test_a_process_that_is_gone_cannot_be_watched() -> None:
    with pytest.raises(ProcessLookupError):
        Watched(2**22 - 1)


def test_spawning_belongs_to_the_main_thread() -> None:
    caught: list[BaseException] = []

    def spawn() -> None:
        try:
            process.assert_main_thread()
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=spawn)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])
    process.assert_main_thread()
