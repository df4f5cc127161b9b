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

from perdure.images.bootstrap import Ext4, Mode, has_subordinate_ids, make_ext4


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
