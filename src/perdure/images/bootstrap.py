"""Debian trees without touching the host: mmdebstrap, as root or in a user namespace, and its tar made into an ext4 disk.

As root, mmdebstrap runs in mount and PID namespaces of its own, so that a build killed at any instant leaves no mount behind and
no process. As an ordinary user it needs a range of subordinate ids (package uidmap) or fakechroot; otherwise HostUnfit says so.
"""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from perdure.core.errors import HostUnfit
from perdure.images import apt
from perdure.images.command import CommandFailed, LineSink, require, run

#: Where the build leaves the names and hashes of the packages inside the tree.
PACKAGE_HASHES = "perdure-packages.sha256"
_KEEP_SMALL = ("man", "info", "locale", "doc", "lintian")
_SUBORDINATE_IDS = 65536


class Mode(StrEnum):
    ROOT = "root"
    UNSHARE = "unshare"
    FAKECHROOT = "fakechroot"


@dataclass(frozen=True, slots=True)
class Tree:
    """One call of mmdebstrap. ``hooks`` are its options in order, such as ``--customize-hook=…``."""

    variant: str
    packages: Sequence[str]
    output: Path  # a tar file
    scratch: Path  # temporary files go below it
    hooks: Sequence[str] = ()


def choose_mode() -> Mode:
    """How this user may build, or HostUnfit with what is missing."""
    if os.geteuid() == 0:
        return Mode.ROOT
    if shutil.which("newuidmap") and _has_subordinate_ids():
        return Mode.UNSHARE
    if shutil.which("fakechroot") and shutil.which("fakeroot"):
        return Mode.FAKECHROOT
    raise HostUnfit(
        "Building an image as an ordinary user needs subordinate user ids, but this user has none or newuidmap is missing.",
        hint="Run 'sudo apt-get install uidmap' and 'sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 "
        f"{getpass.getuser()}', or run the build with sudo.",
    )


def _has_subordinate_ids() -> bool:
    names = (getpass.getuser(), str(os.geteuid()))
    for path in (Path("/etc/subuid"), Path("/etc/subgid")):
        try:
            ranges = [line.split(":") for line in path.read_text().splitlines()]
        except OSError:
            return False
        if not any(entry[0] in names and int(entry[2]) >= _SUBORDINATE_IDS for entry in ranges if len(entry) == 3):
            return False
    return True


async def make_tree(tree: Tree, mode: Mode, *, what: str, on_line: LineSink | None = None) -> None:
    """Run mmdebstrap; raises CommandFailed with its output's tail."""
    sources = tree.scratch / "sources.list"
    sources.write_text("\n".join(apt.mirror_lines()) + "\n")
    hash_hook = (
        f'cd "$1/var/cache/apt/archives"; for d in *.deb; do [ ! -f "$d" ] || sha256sum "$d"; done >> "$1/{PACKAGE_HASHES}"'
    )
    argv = [
        *await _contained(mode),
        require("mmdebstrap", "mmdebstrap"),
        f"--mode={mode}",
        f"--variant={tree.variant}",
        "--format=tar",
        *([f"--include={','.join(tree.packages)}"] if tree.packages else []),
        '--aptopt=APT::Install-Recommends "false"',
        "--aptopt=Acquire::Languages { none; }",
        "--aptopt=Acquire::Retries 3",
        *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in _KEEP_SMALL),
        "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        f"--extract-hook={hash_hook}",
        f"--customize-hook={hash_hook}",
        *tree.hooks,
        apt.SUITE,
        str(tree.output),
        str(sources),
    ]
    await run(argv, what=what, on_line=on_line, env=_environment(tree.scratch))


def _environment(scratch: Path) -> dict[str, str]:
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "LC_ALL": "C.UTF-8",
        "DEBIAN_FRONTEND": "noninteractive",
    }


async def _contained(mode: Mode) -> list[str]:
    """Root only: namespaces that die with us. A container that may not make them gets none."""
    setpriv = shutil.which("setpriv")
    parent_death = [setpriv, "--pdeathsig", "TERM"] if setpriv else []
    unshare = shutil.which("unshare")
    if mode is not Mode.ROOT or unshare is None:
        return parent_death
    namespaces = [unshare, "--mount", "--pid", "--fork", "--kill-child=SIGTERM", "--mount-proc"]
    try:
        await run([*namespaces, "true"], what="A private mount namespace")
    except CommandFailed:
        return parent_death
    return [*parent_death, *namespaces]


@dataclass(frozen=True, slots=True)
class Ext4:
    """How a tar becomes a disk. ``uuid`` makes equal content give equal disks."""

    tar: Path
    output: Path
    size: str  # as mkfs.ext4 takes it, e.g. 8G
    label: str
    uuid: str
    options: Sequence[str] = ()
    exclude: Sequence[str] = ()  # tar patterns


async def make_ext4(disk: Ext4, mode: Mode, scratch: Path, *, what: str) -> None:
    """Unpack a tar and put it into a new ext4 file, sparse, owners as in the tar; the unpacked tree is removed again."""
    tree = scratch / "tree"
    mkfs = require("mkfs.ext4", "e2fsprogs")
    excludes = " ".join(f"--exclude={shlex.quote(pattern)}" for pattern in disk.exclude)
    options = " ".join(shlex.quote(option) for option in disk.options)
    quoted = {name: shlex.quote(str(value)) for name, value in (("tree", tree), ("tar", disk.tar), ("out", disk.output))}
    script = (
        f"set -e; trap 'rm -rf {quoted['tree']}' EXIT; mkdir {quoted['tree']}; "
        f"tar -x -p --numeric-owner --xattrs {excludes} -f {quoted['tar']} -C {quoted['tree']}; "
        f"{mkfs} -q -F -L {disk.label} -U {disk.uuid} -E hash_seed={disk.uuid},root_owner=0:0 {options} "
        f"-d {quoted['tree']} {quoted['out']} {disk.size}"
    )
    prefix = {
        Mode.ROOT: [],
        Mode.UNSHARE: ["unshare", "--map-root-user", "--map-auto"],
        Mode.FAKECHROOT: ["fakeroot", "--"],
    }[mode]
    await run([*prefix, "sh", "-c", script], what=what, env=_environment(scratch))
