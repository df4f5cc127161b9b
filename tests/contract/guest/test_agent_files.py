"""What only a real guest can show of files: kernel files, other file systems, what programs do while somebody watches."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from perdure.core.errors import Busy, Conflict
from perdure.wire.guest.tar import Kind
from perdure.wire.node import FinishUpload, WatchEvent, WatchHandle, WatchKind
from tests.contract.guest.places import DEADLINE_S, Place
from tests.contract.guest.test_files import chunks, content, members, packed, told

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def directory(real: Place) -> AsyncIterator[str]:
    path = f"/tmp/files-{os.urandom(4).hex()}"
    await real.guest.make_dir(path)
    yield path
    await real.guest.remove(path, recursive=True)


async def collected(handle: WatchHandle, last: str) -> list[WatchEvent]:
    """Events up to the first of a path that ends so."""
    seen = []
    async with asyncio.timeout(DEADLINE_S):
        async for event in handle.events():
            seen.append(event)
            if event.path.endswith(last):
                return seen
    raise AssertionError(f"the watch ended before {last}: {seen}")


async def test_files_of_the_kernel_are_read_whole_and_their_true_size_is_told(real: Place) -> None:
    """(peers: row 27) stat says 0 of those of /proc, and 4096 of those of /sys."""
    for path in ("/proc/1/status", "/proc/version", "/sys/kernel/mm/transparent_hugepage/enabled"):
        done = await real.run(f"cat {path}")
        if done.exited.exit_code != 0:
            continue  # this sandbox has no /sys
        reading = await real.guest.open_file(path)
        data = b"".join([part async for part in reading.chunks()])
        await reading.close()
        assert data and reading.size == len(data), path
        assert data.split()[:3] == done.stdout.split()[:3]
        assert (await real.guest.hash_file(path)).size > 0


@pytest.mark.long_on("vm")
async def test_a_kernel_file_of_any_length_is_read_to_its_end(real: Place, directory: str) -> None:
    """One that is larger than what is looked at first has no size that could be declared."""
    done = await real.run("cat /proc/kallsyms | wc -c")
    length = int(done.stdout or 0)
    if length <= 65536:
        pytest.skip("this kernel has no symbols to show")
    reading = await real.guest.open_file("/proc/kallsyms")
    assert reading.size is None
    assert len(b"".join([part async for part in reading.chunks()])) == length
    await reading.close()


async def test_a_growing_file_is_read_as_it_was_opened_at_least(real: Place, directory: str) -> None:
    await real.guest.write_file(f"{directory}/log", chunks(b"x" * 200_000))
    reading = await real.guest.open_file(f"{directory}/log")
    await real.run(f"echo more >> {directory}/log")
    data = b"".join([part async for part in reading.chunks()])
    await reading.close()
    assert reading.size == 200_000 and data.startswith(b"x" * 200_000)


async def test_revisions_see_what_programs_do(real: Place, directory: str) -> None:
    path = f"{directory}/f"
    await real.run(f"echo one > {path}")
    revisions = {(await real.guest.stat(path)).revision}
    for change in (f"echo twos > {path}", f"chmod 700 {path}", f"cp {path} {path}2 && mv {path}2 {path}", f"touch -d @1 {path}"):
        await real.run(change)
        revisions.add((await real.guest.stat(path)).revision)
    assert len(revisions) == 5


async def test_an_upload_reaches_another_file_system(real: Place) -> None:
    await real.run("mkdir -p /tmp/other && mount -t tmpfs tmpfs /tmp/other")
    upload, data = f"upl_{os.urandom(8).hex()}", os.urandom(400_000)
    await real.guest.begin_upload(upload, "/tmp/other/f")
    await real.guest.append_upload(upload, 0, chunks(data))
    await real.guest.finish_upload(FinishUpload(upload, "/tmp/other/f", len(data), hashlib.sha256(data).hexdigest(), 0o755))
    assert await content(real, "/tmp/other/f") == data
    assert (await real.run("ls -A /tmp/other /var/lib/perdure/uploads")).stdout.split() == [
        b"/tmp/other:",
        b"f",
        b"/var/lib/perdure/uploads:",
    ]
    await real.run("umount /tmp/other")


async def test_two_transfers_do_not_mix_in_one_upload(real: Place) -> None:
    upload, entered, let_go = f"upl_{os.urandom(8).hex()}", asyncio.Event(), asyncio.Event()
    await real.guest.begin_upload(upload)

    async def slow() -> AsyncIterator[bytes]:
        yield b"one"
        entered.set()
        await let_go.wait()

    first = asyncio.create_task(real.guest.append_upload(upload, 0, slow()))
    await entered.wait()
    async with asyncio.timeout(DEADLINE_S):
        while await real.guest.upload_offset(upload) != 3:
            continue  # once it has arrived it is being written
    with pytest.raises((Busy, Conflict)):
        await real.guest.append_upload(upload, 3, chunks(b"two"))
    let_go.set()
    assert await first == 3
    await real.guest.drop_upload(upload)


async def test_a_tree_with_everything_in_it_is_packed(real: Place, directory: str) -> None:
    await real.run(
        f"cd {directory}; mkdir -p a/b; echo x > a/f; chmod 4711 a/f; ln -s f a/l; ln -s a d; mkfifo p; "
        "touch -d @1234567890.123456789 a/f"
    )
    found = members(await packed(real, directory))
    assert sorted(found) == ["./", "a/", "a/b/", "a/f", "a/l", "d"]
    assert found["a/f"] == (Kind.FILE, 0o4711, 1_234_567_890_123_456_789, b"x\n")
    made = await real.guest.unpack(f"{directory}/copy", chunks(await packed(real, f"{directory}/a")))
    assert (made.files, made.links) == (1, 1)
    assert (await real.run(f"stat -c '%a %Y' {directory}/copy/f")).stdout == b"711 1234567890\n"


@pytest.mark.long_on("vm")
async def test_a_large_tree_holds_up_neither_ping_nor_command(real: Place, directory: str) -> None:
    await real.run(f"cd {directory}; for i in 1 2 3 4; do head -c 3000000 /dev/urandom > f$i; done")
    reading = await real.guest.pack(directory)
    parts = reading.chunks()
    length = len(await anext(parts))
    await real.guest.ping()
    assert (await real.run("echo quick")).stdout == b"quick\n"
    async for part in parts:
        length += len(part)
    assert length > 12_000_000
    await reading.close()


async def test_programs_are_watched(real: Place, directory: str) -> None:
    handle = await real.guest.watch(directory, recursive=True)
    await real.run(f"cd {directory}; echo one > f; echo two >> f; mkdir d; echo x > d/g; mv d/g g; rm f; chmod 700 g; touch last")
    events = [(event.kind.value, event.path.removeprefix(f"{directory}/")) for event in await collected(handle, "/last")]
    assert ("created", "f") in events and ("written", "f") in events and ("removed", "f") in events
    assert ("created", "d") in events and ("attributes", "g") in events
    assert {("renamed", "g"), ("created", "g")} & set(events), "a file that came out of a directory as new as that"
    await handle.close()


async def test_what_comes_in_and_goes_out_is_told(real: Place, directory: str) -> None:
    await real.run(f"cd {directory}; mkdir in out; mkdir -p out/tree/deep")
    handle = await real.guest.watch(f"{directory}/in", recursive=True)
    await real.run(f"cd {directory}; mv out/tree in/tree; touch in/tree/deep/f; mv in/tree out/again; touch out/again/x in/last")
    events = [(event.kind, event.path.removeprefix(f"{directory}/in/")) for event in await collected(handle, "/last")]
    assert (WatchKind.CREATED, "tree") in events and (WatchKind.CREATED, "tree/deep") in events
    assert not [path for _, path in events if path.endswith("/x")]
    await handle.close()


async def test_files_written_by_perdure_appear_once_and_whole(real: Place, directory: str) -> None:
    """Nobody who watches sees the name under which a file is written."""
    handle = await real.guest.watch(directory)
    await real.guest.write_file(f"{directory}/f", chunks(b"x" * 100_000))
    await real.guest.make_dir(f"{directory}/last")
    events = await collected(handle, "/last")
    assert {event.path for event in events} == {f"{directory}/f", f"{directory}/last"}
    await handle.close()


@pytest.mark.long_on("vm")
async def test_events_that_nobody_read_are_lost_audibly(real: Place, directory: str) -> None:
    handle = await real.guest.watch(directory)
    await handle.close()
    await real.run(f"cd {directory}; for i in $(seq 4000); do : > a-rather-long-name-so-that-there-are-many-bytes-$i; done")
    await real.guest.make_dir(f"{directory}/last")
    again = await real.guest.resume_watch(handle.watch_id, 0)
    events = await collected(again, "/last")
    assert [event.kind for event in events].index(WatchKind.OVERFLOW) == 0
    assert events[-1].path == f"{directory}/last" and len(events) > 1000
    await again.close()


async def test_a_watch_outlives_the_connection(real: Place, directory: str) -> None:
    handle = await real.guest.watch(directory)
    reader = asyncio.create_task(collected(handle, "/never"))
    await real.guest.make_dir(f"{directory}/before")
    await real.link.open(DEADLINE_S)
    with pytest.raises(Exception, match="connection"):
        await reader
    await real.guest.make_dir(f"{directory}/after")
    again = await real.guest.resume_watch(handle.watch_id, 0)
    assert told(await collected(again, "/after")) == [("created", f"{directory}/before"), ("created", f"{directory}/after")]
    await again.close()
