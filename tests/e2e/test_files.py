"""Files of a real workspace, through the SDK and the command line: over sleeps, in bulk, while programs run."""

from __future__ import annotations

import hashlib
import io
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perdure.sdk import Workspace
from tests.e2e.live import DEADLINE_S, Live, serving, shell

pytestmark = [pytest.mark.qemu, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def live(base_image: Path) -> Iterator[Live]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def workspace(live: Live) -> Workspace:
    return live.workspace("files")


class Breaking(io.BytesIO):
    """A file whose reading is an occasion for something to happen, once, after so many bytes."""

    def __init__(self, data: bytes, after: int, what: Callable[[], object]) -> None:
        super().__init__(data)
        self._after, self._what = after, [what]

    def read(self, size: int | None = -1) -> bytes:
        if self._what and self.tell() >= self._after:
            self._what.pop()()
        return super().read(size)


def test_an_upload_goes_on_after_a_sleep(workspace: Workspace) -> None:
    data = os.urandom(6_000_000)
    generation = workspace.refresh().generation
    written = workspace.files.write_resumable("/root/up", Breaking(data, 3_000_000, workspace.sleep))
    assert written.sha256 == hashlib.sha256(data).hexdigest() == workspace.files.hash("/root/up").sha256
    assert workspace.refresh().generation == generation + 1
    assert shell(workspace, "ls -A /var/lib/perdure/uploads") == ""


def test_a_download_goes_on_after_a_sleep(workspace: Workspace) -> None:
    shell(workspace, "head -c 6000000 /dev/urandom > /root/down; sync")
    received = bytearray()
    for piece in workspace.files.stream("/root/down"):
        if not received:
            workspace.sleep()
        received += piece
    assert hashlib.sha256(received).hexdigest() == shell(workspace, "sha256sum < /root/down").split()[0]


def test_a_watch_sleeps_and_wakes_with_the_memory(workspace: Workspace) -> None:
    shell(workspace, "mkdir -p /root/watched")
    watch = workspace.files.watch_dir("/root/watched", recursive=True)
    begun, seen = threading.Event(), list[tuple[str, str]]()

    def read() -> None:
        for event in watch:
            seen.append((event.type, event.reason or event.path))
            begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    number = 0
    while not begun.wait(1):  # until it watches, nothing is told
        shell(workspace, f"mkdir /root/watched/{number}")
        number += 1
    generation = workspace.refresh().generation
    workspace.sleep()
    reader.join(DEADLINE_S)
    assert seen[-1] == ("ended", "generation")
    assert workspace.refresh().generation == generation, "nothing was woken to go on"
    shell(workspace, "touch /root/watched/0/after")
    for event in watch:
        assert event.type != "overflow"
        if event.path == "/root/watched/0/after":
            break


def test_a_large_tree_goes_there_and_back(live: Live, workspace: Workspace, tmp_path: Path) -> None:
    """A thousand files in a hundred directories, with all sizes, modes, odd names and links."""
    chance, source = random.Random(3), tmp_path / "source"
    for number in range(100):
        directory = source / f"{number % 10}" / os.fsdecode(b"d\xff %d" % number)
        directory.mkdir(parents=True)
        for name in range(10):
            (directory / f"{name}").write_bytes(chance.randbytes(chance.choice([0, 1, 511, 512, 513, 5000, 70_000])))
            (directory / f"{name}").chmod(chance.choice([0o644, 0o600, 0o755]))
        (directory / "link").symlink_to(f"../{directory.name}/{chance.randrange(10)}")
    live.ok("cp", str(source), f"{workspace.name}:/root/tree")
    assert shell(workspace, "find /root/tree -type f | wc -l; find /root/tree -type l | wc -l").split() == ["1000", "100"]
    live.ok("cp", f"{workspace.name}:/root/tree", str(tmp_path / "back"))
    assert facts(tmp_path / "back") == facts(source)


def facts(top: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in top.rglob("*"):
        known = path.lstat()
        what = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(top))] = (what, None if path.is_symlink() else (known.st_mode, known.st_mtime_ns))
    return found


@pytest.mark.long
def test_kernel_files_are_copied_whole_by_every_way(live: Live, workspace: Workspace, tmp_path: Path) -> None:
    """(peers: row 27) stat says that they are empty, or 4096 bytes."""
    version = shell(workspace, "cat /proc/version")
    assert workspace.files.read("/proc/version").strip() == version
    live.ok("cp", f"{workspace.name}:/proc/version", str(tmp_path / "version"))
    assert (tmp_path / "version").read_text().strip() == version
    assert live.ok("cp", f"{workspace.name}:/proc/version", "-").text == version
    live.run("cp", f"{workspace.name}:/proc/sys/kernel/random", str(tmp_path / "random"))
    assert (tmp_path / "random/boot_id").read_text().strip() == shell(workspace, "cat /proc/sys/kernel/random/boot_id")
