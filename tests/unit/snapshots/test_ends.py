"""The end of a run comes after everything that writes its live record."""

from __future__ import annotations

import asyncio
import threading

import pytest

from perdure.snapshots.manifest import LiveRecord
from tests.fakes.tiny_node import Node, capture


async def test_a_merge_cut_off_while_it_writes_the_live_record_leaves_none_after_the_end(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, machine = await node.wake(1)
    for step in range(3):
        machine.write_disk(b"%d" % step)
        await capture(run, machine)
    real, entered, go_on = node.store.record, asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(record: LiveRecord) -> None:
        loop.call_soon_threadsafe(entered.set)
        assert go_on.wait(30)
        real(record)

    monkeypatch.setattr(node.store, "record", slow)
    merge = asyncio.create_task(run.collapse(machine, 1))  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        await entered.wait()
    merge.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not merge.done(), "a thread still writes"
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await merge
    run.end()
    assert node.store.live() == ()
    assert node.store.open().debris == ()
