"""Who may build without root, and what becomes of a tar."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from perdure.core.errors import HostUnfit
from perdure.images import bootstrap
from perdure.images.bootstrap import Ext4, Mode, choose_mode, has_subordinate_ids, make_ext4
from perdure.images.command import CommandFailed


@pytest.mark.parametrize(
    ("text", "enough"),
    [
        ("alice:100000:65536\n", True),
        ("1000:100000:65536\n", True),
        ("bob:1:65536\nalice:100000:100000\n", True),
        ("alice:100000:1000\n", False),
        ("bob:100000:65536\n", False),
        ("# nothing\n\nalice:1\n", False),
        ("", False),
    ],
)
def test_enough_subordinate_ids(tmp_path: Path, text: str, enough: bool) -> None:
    (tmp_path / "subuid").write_text(text)
    assert has_subordinate_ids(tmp_path / "subuid", ("alice", "1000")) is enough


def test_no_file_means_no_ids(tmp_path: Path) -> None:
    assert not has_subordinate_ids(tmp_path / "subuid", ("alice",))


def test_root_needs_no_namespace_to_own_files() -> None:
    assert Mode.ROOT.as_root == []
    assert Mode.UNSHARE.as_root[0] == "unshare"


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As a user who has everything that an ordinary one needs."""
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(bootstrap, "require", lambda tool, _package: tool)
    monkeypatch.setattr(bootstrap, "has_subordinate_ids", lambda _path, _names: True)
    monkeypatch.setattr(bootstrap, "run", _nothing)
    return monkeypatch


async def _nothing(*_: object, **__: object) -> str:
    return ""


async def test_an_ordinary_user_builds_in_a_namespace(ordinary: pytest.MonkeyPatch) -> None:
    assert await choose_mode() is Mode.UNSHARE


async def test_a_user_without_subordinate_ids_is_told_the_command(ordinary: pytest.MonkeyPatch) -> None:
    ordinary.setattr(bootstrap, "has_subordinate_ids", lambda _path, _names: False)
    with pytest.raises(HostUnfit) as caught:
        await choose_mode()
    assert caught.value.message == "Building an image as an ordinary user needs subordinate user ids, and 12345 has none."
    assert "usermod --add-subuids" in caught.value.hint


async def test_a_host_that_forbids_namespaces_is_told_what_to_allow(ordinary: pytest.MonkeyPatch) -> None:
    async def forbidden(*_: object, **__: object) -> str:
        raise CommandFailed("A user namespace", 1, ["unshare: unshare failed: Operation not permitted"])

    ordinary.setattr(bootstrap, "run", forbidden)
    with pytest.raises(HostUnfit) as caught:
        await choose_mode()
    sentence = "This host does not let an ordinary user make a user namespace, so no image can be built without root."
    assert caught.value.message == sentence
    assert "unprivileged_userns_clone" in caught.value.hint and "Operation not permitted" in caught.value.internal


def described(disk: Path) -> dict[str, str]:
    text = subprocess.run(["/sbin/dumpe2fs", "-h", disk], capture_output=True, text=True, check=True).stdout
    return dict(re.findall(r"^([^:]+): +(.*)$", text, re.MULTILINE))


@pytest.mark.skipif(os.geteuid() != 0, reason="owners in a file system are root's to choose")
@pytest.mark.skipif(shutil.which("mkfs.ext4", path="/usr/sbin:/sbin:/usr/bin") is None, reason="this host has no mkfs.ext4")
async def test_a_disk_has_all_extended_options_at_once(tmp_path: Path) -> None:
    """Its seed for the hashes of names is its own id, so that equal content is an equal disk; and it may grow to 1 TiB."""
    tar, output, scratch = tmp_path / "tree.tar", tmp_path / "disk.raw", tmp_path / "scratch"
    scratch.mkdir()
    with tarfile.open(tar, "w") as target:
        member = tarfile.TarInfo("./file")
        member.size = 5
        target.addfile(member, io.BytesIO(b"hello"))
    identity = "01234567-89ab-cdef-0123-456789abcdef"
    extended = ("lazy_itable_init=0", f"resize={(1 << 40) // 4096}")
    await make_ext4(Ext4(tar, output, "64M", "test", identity, ("-b", "4096"), extended), Mode.ROOT, scratch, what="A disk")
    facts = described(output)
    assert (facts["Filesystem UUID"], facts["Directory Hash Seed"]) == (identity, identity)
    assert int(facts["Reserved GDT blocks"]) > 100, "room for the descriptors of 1 TiB"
    assert not list(scratch.iterdir())
