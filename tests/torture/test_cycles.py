"""What is never touched is never changed: ten cycles of sleep, crash and fork, each going on with what the one before left."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from random import Random

import pytest

from perdure.sdk import Workspace
from tests.e2e.crashing import Place
from tests.fakes.disk import QuickDisk
from tests.torture.machine import NEVER_TOUCHED, base_ram
from tests.torture.node import TortureNode, make_image, small_thresholds
from tests.torture.story import Awake, Story
from tests.torture.vm_rounds import UNRESPONSIVE_S, Counter

CYCLES = 10
CYCLE = ("sleep", "crash", "fork")


async def test_a_block_that_nobody_touches_is_the_same_after_ten_cycles(tmp_path: Path) -> None:
    make_image(tmp_path / "image")
    truth = hashlib.sha256(base_ram()[NEVER_TOUCHED].tobytes()).hexdigest()
    node = TortureNode(tmp_path, tmp_path / "image", disk=QuickDisk())
    with small_thresholds():
        await node.open()
        story = Story(node, Random(1))
        one = await story.create()
        for cycle in range(CYCLES * len(CYCLE)):
            one = await _go_on(story, one, CYCLE[cycle % len(CYCLE)])
            ram = node.machines[one.workspace_id].memory.ram
            assert hashlib.sha256(ram[NEVER_TOUCHED].tobytes()).hexdigest() == truth
        await node.crash()


async def _go_on(story: Story, one: Awake, how: str) -> Awake:
    """The story checks everything that the guest keeps at each wake."""
    if how == "sleep":
        await story.sleep(one)
        await story.wake(one)
        return one
    await story.checkpoint(one)
    if how == "crash":
        await story.node.machines[one.workspace_id].kill()
        await story.node.stop(one.workspace_id, one.generation)
        story.asleep[one.workspace_id] = story.awake.pop(one.workspace_id)
        await story.wake(one)
        return one
    await story.fork(one)
    await story.node.stop(one.workspace_id, one.generation)
    del story.awake[one.workspace_id]
    (child,) = story.awake.values()
    return child


@pytest.mark.qemu
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_program_in_a_virtual_machine_holds_after_ten_cycles(images_dir: Path, base_image: Path) -> None:
    """Memory, file, connection and the block that it never touches; each ``ask`` compares all of them."""
    with Place.temporary(images_dir, PERDURE_UNRESPONSIVE_S=UNRESPONSIVE_S) as place:
        place.up()
        with place.client() as client:
            workspace = Workspace.create("cycles", client=client)
            Counter(workspace).start()
            for cycle in range(CYCLES):
                number = Counter(workspace).ask(f"put {cycle}").memory
                workspace = _next(place, workspace, CYCLE[cycle % len(CYCLE)])
                assert Counter(workspace).ask("tell").memory == number
            workspace.delete()
        place.down()
        assert place.processes() == []


def _next(place: Place, workspace: Workspace, how: str) -> Workspace:
    if how == "sleep":
        workspace.sleep()
        return workspace
    if how == "fork":
        (child,) = workspace.fork(1)
        assert isinstance(child, Workspace)
        workspace.delete()
        return child
    workspace.checkpoint()
    pid = place.vmm_of(workspace.id)
    os.kill(pid, signal.SIGKILL)
    place.until(lambda: workspace.refresh().state == "hibernated", "the loss is recorded")
    return workspace
