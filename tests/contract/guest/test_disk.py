"""What a guest does to its disk as a whole, seen from inside and, when the machine is gone, from outside."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.core.config import Settings
from perdure.images.registry import ImageStore
from perdure.machines.driver import EventKind, Machine
from perdure.wire.node import Guest
from tests.contract.guest.places import DEADLINE_S, booted, linked

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.qemu]


async def write(guest: Guest, path: str, content: bytes) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield content

    await guest.write_file(path, chunks())


async def read(guest: Guest, path: str) -> bytes:
    return b"".join([part async for part in guest.read_file(path)])


async def ends_of(machine: Machine) -> list[EventKind]:
    """What the machine does by itself, to its end."""
    async with asyncio.timeout(DEADLINE_S):
        return [event.kind async for event in machine.events()]


def tool(*argv: str | Path) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def flat(directory: Path) -> Path:
    """The machine's disk as one raw file, as its next boot would find it."""
    below = ImageStore(Settings().images).resolve("base").root.path
    layers = f"driver=qcow2,file.filename={directory / 'disk.qcow2'},backing.driver=raw,backing.file.filename={below}"
    tool("qemu-img", "convert", "-O", "raw", "--image-opts", layers, directory / "flat.raw")
    return directory / "flat.raw"


async def test_a_power_off_ends_the_machine_and_leaves_a_clean_file_system(base_image: Path) -> None:
    """While a program writes; nothing was flushed before, and there is no journal to replay."""
    content = os.urandom(3_000_000)
    async with booted() as (machine, directory):
        watching = asyncio.create_task(ends_of(machine))
        async with linked(machine.connect, "vm") as place:
            await write(place.guest, "/root/kept", content)
            await place.run("(while :; do date >>/root/busy; done) >/dev/null 2>&1 &")
            await place.link.power_off()
            assert await watching == [EventKind.POWEROFF, EventKind.EXITED]
        disk = await asyncio.to_thread(flat, directory)
        features = tool("dumpe2fs", "-h", disk)
        assert "Filesystem state:         clean" in features and "needs_recovery" not in features
        tool("e2fsck", "-fn", disk)
        tool("debugfs", "-R", f"dump /root/kept {directory / 'kept'}", disk)
        assert (directory / "kept").read_bytes() == content
        disk.unlink()


@pytest.mark.long
async def test_a_file_system_grows_to_its_disk_and_keeps_what_is_on_it(base_image: Path) -> None:
    content, more = os.urandom(1_000_000), 4
    async with booted(more_gib=more) as (machine, _), linked(machine.connect, "vm") as place:
        await write(place.guest, "/root/kept", content)
        before = int((await place.run("stat -f -c '%b * %S' / | xargs expr")).stdout)
        free = int((await place.run("df --output=avail -B1 / | tail -1")).stdout)
        assert (await place.run(f"fallocate -l {free + (1 << 30)} /root/large")).exited.exit_code != 0, "it has no room yet"
        await place.run("rm -f /root/large")

        size = await place.link.grow_disk()
        assert before + (more - 0.5) * (1 << 30) < size <= before + (more << 30)
        assert int((await place.run("stat -f -c '%b * %S' / | xargs expr")).stdout) == size
        assert (await place.run(f"fallocate -l {free + (1 << 30)} /root/large")).exited.exit_code == 0
        assert (
            await place.run("echo end | dd of=/root/large conv=notrunc oflag=append; sync; tail -c 4 /root/large")
        ).stdout == b"end\n"
        assert await read(place.guest, "/root/kept") == content
        assert await place.link.grow_disk() == size, "there is nothing left to grow"
