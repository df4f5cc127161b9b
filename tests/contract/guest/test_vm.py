"""What only a VM can show: a real virtio port that is cut, a restore in the middle of a frame, a broken user root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from perdure.core.config import Settings
from perdure.core.ids import ExecId
from perdure.images.registry import ImageStore
from perdure.machines.driver import Accelerator, ChannelName, DiskChain, DiskLayer, LaunchSpec, Machine, Ram
from perdure.machines.guestlink import WakeRequest
from perdure.machines.qemu import QemuDriver
from perdure.wire.guest import Mux, Role
from perdure.wire.guest.frames import FrameType, encode
from perdure.wire.node import ExecOutput, ExecSpec, MachineSize
from tests.contract.guest.places import DEADLINE_S, VM_MIB, Place, booted, collect, identity, linked, new_id, woken

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.qemu]


def ping() -> tuple[bytes, bytes]:
    """A ping's frame and its answer's (on the data channel)."""
    mux = Mux(Role.HOST)
    call = mux.call({"op": "ping"})
    return mux.pull(), encode(FrameType.REPLY, call, b'{"ok":true}')


async def cut(machine: Machine, channel: ChannelName, request: bytes, read: int = 0) -> None:
    """Connect, resynchronise, send, read so many bytes of what comes back, hang up."""
    reader, writer = await machine.connect(channel)
    mux = Mux(Role.HOST)
    mux.begin(os.urandom(16))
    writer.write(mux.pull(1 << 20))
    while not mux.synced:
        mux.receive(await reader.read(4096))
    writer.write(request)
    await writer.drain()
    if read:
        await reader.readexactly(read)
    writer.close()


async def test_a_port_cut_at_every_byte_in_both_directions_works_again() -> None:
    request, answer = ping()
    async with woken() as machine:
        for channel in ChannelName:
            for size in range(len(request)):
                await cut(machine, channel, request[:size])
            for size in range(1, len(answer)):
                await cut(machine, channel, request, read=size)
        async with linked(machine.connect, "vm") as place:
            assert (await place.run("echo fine")).stdout == b"fine\n"


async def reborn(machine: Machine, directory: Path, name: str) -> Machine:
    """Capture a running machine, kill it, and let its memory live on in another, over the same base and disk."""
    await machine.pause()
    devices = directory / f"{name}.state"
    await machine.save_devices(devices)
    pages = machine.memory.written_pages()
    content = machine.memory.read_pages(pages)
    await machine.kill()
    image = ImageStore(Settings().images).resolve("base")
    spec = LaunchSpec(name, directory / name, image.shape(MachineSize(VM_MIB, 1)), Ram(directory / "ram"), Accelerator.TCG)
    after = await QemuDriver().prepare(spec)
    try:
        await after.attach_disk(DiskChain((image.root, DiskLayer(directory / "disk.qcow2", "qcow2"))))
        after.memory.write_pages(pages, content)
        await after.load_devices(devices)
        await after.resume()
    except BaseException:
        await after.kill()
        raise
    return after


async def connected_client(place: Place) -> ExecId:
    """A program that waits on a connection to the API port, which the host has accepted."""
    program = "import socket;s=socket.create_connection(('127.0.0.1',7071));print(s.recv(1))"
    client = await place.guest.start_exec(ExecSpec(new_id(), argv=("python3", "-c", program)))
    while not place.streams:
        await place.run("sleep 0.1")
    await place.streams[0][2].accept()
    await place.link.ping()
    return client.exec_id


@pytest.mark.long
async def test_half_a_frame_in_a_snapshot_never_joins_the_next_connection(base_image: Path) -> None:
    """Three restores, one after the other: cut in the header, in the payload, before the last byte."""
    request, _ = ping()
    async with booted() as (machine, directory):
        alive = machine
        try:
            async with linked(alive.connect, "vm") as place:
                reader = await place.guest.start_exec(ExecSpec(new_id(), shell="cat", stdin=True))
            for generation, size in enumerate((1, 12, len(request) - 1), start=2):
                async with linked(alive.connect, "vm", generation) as place:
                    client = await connected_client(place)
                    assert await place.link.quiesce(deadline_s=DEADLINE_S)
                for channel in ChannelName:
                    await cut(alive, channel, request[:size])
                alive = await reborn(alive, directory, f"guest-{generation}")
                async with linked(alive.connect, "vm", generation) as place:
                    assert place.woken.connections_dropped == 1
                    assert reader.exec_id in place.woken.execs_running
                    ended = await collect(await place.guest.attach_exec(client))
                    assert b"ConnectionResetError" in ended.stderr
            async with linked(alive.connect, "vm", 9) as place:
                handle = await place.guest.attach_exec(reader.exec_id)
                await handle.write_stdin(b"still here\n")
                await handle.close_stdin()
                assert (await collect(handle)).stdout == b"still here\n"
        finally:
            await alive.kill()


async def test_a_long_read_of_random_bytes_ends_when_users_stand_still(vm_place: Place) -> None:
    """Else the kernel would go on filling it in each fork from the same state, whatever entropy that has been given."""
    size, turns = 64 << 20, 5
    turn = f"print('go',flush=True);print(len(os.read(f,{size})),flush=True)"
    program = f"import os;f=os.open('/dev/urandom',0)\nfor _ in range({turns}): {turn}"
    reading = await vm_place.guest.start_exec(ExecSpec(new_id(), argv=("python3", "-c", program)))
    said, begun = b"", 0
    async for event in reading.events():
        if isinstance(event, ExecOutput):
            said += event.data
        while begun < said.count(b"go"):  # it reads, or is about to
            begun += 1
            assert await vm_place.link.quiesce(deadline_s=DEADLINE_S)
            await vm_place.link.thaw()
    lengths = [int(word) for word in said.split() if word != b"go"]
    assert len(lengths) == turns and min(lengths) < size, "none was cut short"


async def test_without_a_python_of_the_users_and_without_room_everything_still_works(vm_place: Place) -> None:
    """Replaces the user's python3 and fills the disk; the agent's own are on another disk."""
    await vm_place.run("cp -a /usr/bin/python3 /dev/shm/python3; printf '#!/bin/sh\\nexit 9\\n' >/usr/bin/python3")
    try:
        filled = await vm_place.run("fallocate -l 20G /root/fill 2>&1; dd if=/dev/zero of=/root/fill2 bs=1M 2>&1 | tail -1")
        assert filled.exited.exit_code == 0
        assert (await vm_place.run("dd if=/dev/zero of=/root/fill3 bs=64K count=16")).exited.exit_code != 0, "the disk is full"
        assert (await vm_place.run("python3 -c 'print(1)'")).exited.exit_code == 9
        assert await vm_place.link.quiesce(deadline_s=DEADLINE_S)
        await vm_place.link.thaw()
        report = await vm_place.link.wake(WakeRequest(identity(1, "full"), new_identity=True, environment={"COLOUR": "green"}))
        assert report.clock_uncertainty_s < 60
        assert (await vm_place.run("hostname")).stdout == b"full\n"
        assert [entry.name for entry in await vm_place.guest.list_dir("/root")].count("fill2") == 1
    finally:
        await vm_place.run("rm -f /root/fill*; cp -a /dev/shm/python3 /usr/bin/python3; rm /dev/shm/python3")
