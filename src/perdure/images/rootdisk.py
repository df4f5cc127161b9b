"""The users' root disk of an image: a Debian system with the recipe's packages, files and commands, as a sparse ext4 file."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shlex
import tarfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from perdure.core.errors import BuildFailed
from perdure.images.bootstrap import PACKAGE_HASHES, Ext4, Mode, Tree, make_ext4, make_tree
from perdure.images.command import CommandFailed
from perdure.images.progress import Progress, ProgressSink, Step
from perdure.images.recipe import Recipe

LABEL = "perdure-user"
#: A small journal: its blocks are rewritten round and round, and every one that was touched is in a sleeping workspace's overlay.
_JOURNAL_MIB = 8
#: Block groups up to 1 TiB have their descriptors reserved. mke2fs would reserve for 1024 times the disk's size, and growing it
#: while mounted needs all of these in one transaction, for which the small journal has no room. Beyond that ext4 uses meta_bg.
_GROWTH_RESERVED_BLOCKS = (1 << 40) // 4096
_MARK = "PERDURE-COMMAND"
_STATUS = "var/lib/dpkg/status"
_FINISH = """set -e
cd "$1"
: > etc/machine-id
rm -f var/lib/dbus/machine-id etc/ssh/ssh_host_* root/.bash_history
: > etc/resolv.conf
echo workspace > etc/hostname
printf '127.0.0.1 localhost\\n::1 localhost ip6-localhost\\n' > etc/hosts
mkdir -p usr/lib/modules
rm -rf var/cache/debconf/*-old var/lib/dpkg/*-old var/log/*.log var/log/apt
"""


@dataclass(frozen=True, slots=True)
class RootDisk:
    """A finished root disk. ``digest`` covers the recipe's part and every package with its hash."""

    path: Path
    digest: str
    packages: Mapping[str, str]  # name -> version, as dpkg has them


async def build_root(recipe: Recipe, scratch: Path, mode: Mode, progress: ProgressSink) -> RootDisk:
    """Build ``root.raw`` in ``scratch``. Raises BuildFailed naming the recipe's command that failed, with its output."""
    progress(Progress(Step.PACKAGES, f"Installing Debian and {len(recipe.packages)} packages"))
    tar, output = scratch / "root.tar", scratch / "root.raw"
    watcher = _Watcher(recipe, progress)
    tree = Tree("minbase", recipe.packages, tar, scratch, _hooks(recipe, scratch))
    try:
        await make_tree(tree, mode, what="Installing the packages with mmdebstrap", on_line=watcher)
    except CommandFailed as error:
        raise watcher.explain(error) from error
    packages, hashes = _read_packages(tar)
    digest = hashlib.sha256(json.dumps([recipe.root_digest, packages, hashes], sort_keys=True).encode()).hexdigest()
    progress(Progress(Step.DISK, f"Making a {recipe.disk_gib} GiB disk"))
    disk = Ext4(
        tar,
        output,
        size=f"{recipe.disk_gib}G",
        label=LABEL,
        uuid=str(uuid.UUID(digest[:32])),
        options=("-m", "0", "-b", "4096", "-J", f"size={_JOURNAL_MIB}"),
        extended=("lazy_itable_init=0", "lazy_journal_init=0", f"resize={_GROWTH_RESERVED_BLOCKS}"),
        exclude=(f"./{PACKAGE_HASHES}", "./dev/*"),
    )
    await make_ext4(disk, mode, scratch, what="Making the root disk's file system")
    tar.unlink()
    output.chmod(0o444)
    return RootDisk(output, digest, packages)


def _hooks(recipe: Recipe, scratch: Path) -> list[str]:
    hooks = []
    if recipe.files:
        archive = scratch / "files.tar"
        archive.write_bytes(_files_tar(recipe))
        hooks.append(f"--customize-hook=tar-in {shlex.quote(str(archive))} /")
    for number, command in enumerate(recipe.commands):
        hooks.append(f'--customize-hook=echo {_MARK} {number}; exec chroot "$1" /bin/sh -e -c {shlex.quote(command)}')
    hooks.append(f"--customize-hook=echo {_MARK} end")
    hooks.append(f"--customize-hook={_FINISH}")
    return hooks


def _files_tar(recipe: Recipe) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as target:
        for entry in recipe.files:
            member = tarfile.TarInfo(entry.path.lstrip("/"))
            member.size, member.mode = len(entry.content), entry.mode
            target.addfile(member, io.BytesIO(entry.content))
    return buffer.getvalue()


class _Watcher:
    """Reads mmdebstrap's output: passes it on as progress and knows which command of the recipe is running."""

    def __init__(self, recipe: Recipe, progress: ProgressSink) -> None:
        self._commands = recipe.commands
        self._progress = progress
        self._running: int | None = None
        self._output: list[str] = []

    def __call__(self, line: str) -> None:
        match = re.match(rf"^{_MARK} (\d+|end)$", line)
        if match is None:
            self._output.append(line)
            del self._output[:-25]
            step = Step.PACKAGES if self._running is None else Step.COMMAND
            self._progress(Progress(step, line, log=True))
            return
        self._output.clear()
        self._running = None if match[1] == "end" else int(match[1])
        if self._running is not None:
            self._progress(Progress(Step.COMMAND, self._commands[self._running], self._running, len(self._commands)))

    def explain(self, error: CommandFailed) -> BuildFailed:
        """The recipe's command that failed, or what apt said about a package, in place of mmdebstrap's own status."""
        if self._running is not None:
            output = [line for line in self._output if not line.startswith(("E: ", "I: "))]
            text = f"The recipe's command {self._running + 1} failed: {self._commands[self._running]}"
            tail = "\nIts output ends with:\n" + "\n".join(output) if output else "\nIt printed nothing."
            return BuildFailed(text + tail, hint="Correct the command in the recipe and build again; nothing was kept.")
        missing = [found[1] for line in error.tail if (found := re.search(r"Unable to locate package (\S+)", line))]
        if missing:
            return BuildFailed(
                f"Debian {', '.join(missing)}: there is no such package.",
                hint="Correct 'packages' in the recipe and build again.",
            )
        return error


def _read_packages(tar: Path) -> tuple[dict[str, str], dict[str, str]]:
    """(name -> version) of what dpkg says is installed, and (package file -> sha256) of what was downloaded."""
    packages: dict[str, str] = {}
    hashes: dict[str, str] = {}
    with tarfile.open(tar) as source:
        for member in source:
            name = member.name.removeprefix("./")
            stream = source.extractfile(member) if name in (_STATUS, PACKAGE_HASHES) and member.isreg() else None
            if stream is None:
                continue
            text = stream.read().decode()
            if name == _STATUS:
                packages = dict(re.findall(r"^Package: (\S+)\n(?:.+\n)*?Version: (\S+)", text, re.MULTILINE))
            else:
                hashes = {line.split()[1]: line.split()[0] for line in text.splitlines()}
    if not packages or not hashes:
        raise BuildFailed("The new system has no package database, so its image cannot be identified.", hint="Report this.")
    return packages, hashes
