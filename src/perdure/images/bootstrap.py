"""Debian trees without touching the host: mmdebstrap, as root or in a user namespace, and its tar made into an ext4 disk.

As root, mmdebstrap runs in mount and PID namespaces of its own, so that a build killed at any instant leaves no mount behind and
no process. As an ordinary user it needs a range of subordinate ids (package uidmap); otherwise HostUnfit says so. fakechroot is
no way out: it mixes the host's C library with the image's, which fails as soon as they differ.
"""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

    @property
    def as_root(self) -> list[str]:
        """Prefix of a command that must see itself as root, with all users there are."""
        return [] if self is Mode.ROOT else ["unshare", "--map-root-user", "--map-auto"]


@dataclass(frozen=True, slots=True)
class Tree:
    """One call of mmdebstrap. ``hooks`` are its options in order, such as ``--customize-hook=…``."""

    variant: str
    packages: Sequence[str]
    output: Path  # a tar file
    scratch: Path  # temporary files go below it
    hooks: Sequence[str] = ()


async def choose_mode() -> Mode:
    """How this user may build, or HostUnfit with what is missing."""
    if os.geteuid() == 0:
        return Mode.ROOT
    require("newuidmap", "uidmap")
    names = _own_names()
    if not all(has_subordinate_ids(path, names) for path in (Path("/etc/subuid"), Path("/etc/subgid"))):
        raise HostUnfit(
            f"Building an image as an ordinary user needs subordinate user ids, and {names[0]} has none.",
            hint=f"Run 'sudo usermod --add-subuids 200000-265535 --add-subgids 200000-265535 {names[0]}', or build with sudo.",
        )
    try:
        await run([*Mode.UNSHARE.as_root, "true"], what="A user namespace")
    except CommandFailed as error:
        raise HostUnfit(
            "This host does not let an ordinary user make a user namespace, so no image can be built without root.",
            hint="Build with sudo, or allow it: sudo sysctl kernel.unprivileged_userns_clone=1 user.max_user_namespaces=1000.",
            internal=error.message,
        ) from error
    return Mode.UNSHARE


def _own_names() -> tuple[str, ...]:
    number = os.geteuid()
    try:
        return pwd.getpwuid(number).pw_name, str(number)
    except KeyError:  # a user id without an account, as in containers
        return (str(number),)


def has_subordinate_ids(path: Path, names: tuple[str, ...]) -> bool:
    """Whether /etc/subuid or /etc/subgid gives one of the names enough ids for a Debian system."""
    try:
        ranges = [line.split(":") for line in path.read_text().splitlines()]
    except OSError:
        return False
    return any(len(entry) == 3 and entry[0] in names and int(entry[2]) >= _SUBORDINATE_IDS for entry in ranges)


async def remove_all(paths: Sequence[Path], mode: Mode) -> None:
    """Remove directories of earlier builds, whoever owns what is in them."""
    if paths:
        await run([*mode.as_root, "rm", "-rf", "--one-file-system", *map(str, paths)], what="Removing what an earlier build left")


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
    with _work_dir(tree.scratch, mode) as work:
        await run(argv, what=what, on_line=on_line, env=_environment(work))


@contextmanager
def _work_dir(scratch: Path, mode: Mode) -> Iterator[Path]:
    """Where mmdebstrap unpacks. In a user namespace it is somebody else, who cannot pass a directory closed to others, as home
    directories often are; then it works in a directory of its own under /tmp, which it empties itself, also when ended."""
    closed = [place for place in scratch.parents if not place.stat().st_mode & 0o001]
    if mode is Mode.ROOT or not closed:
        yield scratch
        return
    with tempfile.TemporaryDirectory(prefix="perdure-build-", ignore_cleanup_errors=True) as work:
        Path(work).chmod(0o755)
        yield Path(work)


def _environment(scratch: Path) -> dict[str, str]:
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "LC_ALL": "C.UTF-8",
        "DEBIAN_FRONTEND": "noninteractive",
    }


async def _contained(mode: Mode) -> list[str]:
    """What makes the build end with us. As root: namespaces, killed as a whole; a container that may not make them gets none.
    Otherwise mmdebstrap is told to end, because only it can remove what it made under other user ids."""
    setpriv = shutil.which("setpriv")
    parent_death = [setpriv, "--pdeathsig", "KILL" if mode is Mode.ROOT else "TERM"] if setpriv else []
    unshare = shutil.which("unshare")
    if mode is not Mode.ROOT or unshare is None:
        return parent_death
    namespaces = [unshare, "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc"]
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
    options: Sequence[str] = ()  # of mke2fs, without -E
    extended: Sequence[str] = ()  # what goes to -E, of which mke2fs takes only the last
    exclude: Sequence[str] = ()  # tar patterns


async def make_ext4(disk: Ext4, mode: Mode, scratch: Path, *, what: str) -> None:
    """Unpack a tar and put it into a new ext4 file, sparse, owners as in the tar; the unpacked tree is removed again."""
    tree = scratch / "tree"
    mkfs = require("mkfs.ext4", "e2fsprogs")
    excludes = " ".join(f"--exclude={shlex.quote(pattern)}" for pattern in disk.exclude)
    options = " ".join(shlex.quote(option) for option in disk.options)
    extended = shlex.quote(",".join((f"hash_seed={disk.uuid}", "root_owner=0:0", *disk.extended)))
    quoted = {name: shlex.quote(str(value)) for name, value in (("tree", tree), ("tar", disk.tar), ("out", disk.output))}
    script = (
        f"set -e; trap 'rm -rf {quoted['tree']}' EXIT; mkdir {quoted['tree']}; "
        f"tar -x -p --numeric-owner --xattrs {excludes} -f {quoted['tar']} -C {quoted['tree']}; "
        f"{mkfs} -q -F -L {disk.label} -U {disk.uuid} -E {extended} {options} "
        f"-d {quoted['tree']} {quoted['out']} {disk.size}"
    )
    await run([*mode.as_root, "sh", "-c", script], what=what, env=_environment(scratch))
