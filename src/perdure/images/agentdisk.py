"""The agent disk: everything of ours inside a machine, on a read-only disk of its own (DESIGN D4).

It holds busybox as init, kernel modules, a small Python 3.13 of its own, e2fsprogs and the guest agent, picked file by file out
of packages that are unpacked but never installed. So it works when the user's root has no Python, no room, or is damaged, and a
newer agent and kernel boot an older disk. Two caches: the picked packages (slow to fetch, named by what was asked for) and the
release (disk, kernel and initrd, named by their content).
"""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import json
import lzma
import shutil
import tarfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files as package_files
from pathlib import Path

import perdure
from perdure.core import files
from perdure.core.errors import BuildFailed
from perdure.images import cpio
from perdure.images.bootstrap import PACKAGE_HASHES, Ext4, Mode, Tree, make_ext4, make_tree
from perdure.images.command import run
from perdure.images.progress import Progress, ProgressSink, Step
from perdure.images.registry import CHECKSUMS, checksums_to_json
from perdure.images.sparse import file_facts
from perdure.wire.guest import PROTOCOL

PACKAGES = (
    "busybox-static",
    "e2fsprogs",
    "kmod",
    "libpython3.13-stdlib",
    "linux-image-cloud-amd64",
    "python3.13-minimal",
)
LABEL = "perdure-agent"
#: Loaded by the initrd, with what they depend on; the rest of the way is built into the kernel.
BOOT_MODULES = ("virtio_blk",)

_LIBRARIES = "usr/lib/x86_64-linux-gnu/"
_PICK = (
    "boot/vmlinuz-*",
    "usr/bin/busybox",
    "usr/bin/kmod",
    "usr/bin/python3.13",
    "usr/sbin/e2fsck",
    "usr/sbin/resize2fs",
    "usr/lib/modules/*",
    "usr/lib/python3.13/*",
    "usr/lib64/ld-linux-x86-64.so.2",
    *(
        f"{_LIBRARIES}{name}.so*"
        for name in (
            *("ld-linux-x86-64", "libblkid", "libc", "libcom_err", "libcrypto", "libe2p", "libexpat", "libext2fs", "libffi"),
            *("liblzma", "libm", "libuuid", "libz", "libzstd"),
        )
    ),
)
_LEAVE = (
    *(f"usr/lib/python3.13/{name}/*" for name in ("ensurepip", "idlelib", "lib2to3", "pydoc_data", "tkinter", "turtledemo")),
    *(f"usr/lib/python3.13/{name}/*" for name in ("sqlite3", "curses", "dbm", "distutils", "unittest", "xmlrpc", "wsgiref")),
    *(f"usr/lib/python3.13/lib-dynload/{name}.*" for name in ("_test*", "xx*", "_xxtest*", "_codecs_*", "_sqlite3", "_curses*")),
    *(f"usr/lib/python3.13/lib-dynload/{name}.*" for name in ("_ssl", "readline", "_dbm", "_ctypes_test", "_bz2", "_tkinter")),
    "*/__pycache__/*",
)
_LINKS = {
    "bin": "usr/bin",
    "sbin": "usr/sbin",
    "lib": "usr/lib",
    "lib64": "usr/lib64",
    "tmp": "run/tmp",
    "usr/sbin/init": "../bin/busybox",
    "usr/sbin/depmod": "../bin/kmod",
    "usr/bin/python3": "python3.13",
    "etc/mtab": "../proc/self/mounts",
}
_MOUNT_POINTS = ("dev", "proc", "root", "run", "sys", "user", "etc", "opt/perdure/perdure/guest", "opt/perdure/perdure/wire")
_RELEASE = "release.json"
_FILES = ("kernel", "initrd", "agent.raw")


@dataclass(frozen=True, slots=True)
class AgentRelease:
    """A kernel, the initrd that goes with it, and the agent disk. ``digest`` covers all three."""

    directory: Path
    digest: str
    agent_digest: str  # of the disk's content
    kernel_digest: str
    sources_digest: str  # of the guest agent's sources and our init
    kernel_version: str
    agent_protocol: int
    packages: Mapping[str, str]  # file name of the package -> sha256

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(self.directory / name for name in _FILES)


def guest_sources() -> dict[str, Path]:
    """The agent's Python sources: path below ``/opt/perdure`` on the disk -> file here."""
    package = Path(perdure.__file__).parent
    found = {}
    for top in (package / "guest", package / "wire" / "guest", package / "wire" / "guest.py"):
        for path in [top] if top.is_file() else sorted(top.rglob("*.py")):
            found[f"perdure/{path.relative_to(package).as_posix()}"] = path
    return found


def assets() -> dict[str, bytes]:
    """Our own scripts on the disk and in the initrd, by name."""
    folder = package_files("perdure.images") / "assets"
    return {name: (folder / name).read_bytes() for name in ("init", "inittab", "rc", "agent", "down")}


def sources_digest() -> str:
    """SHA-256 of everything of ours that goes into a release: when it changes, a new release is due."""
    digest = hashlib.sha256()
    contents = {name: path.read_bytes() for name, path in guest_sources().items()} | assets()
    for name, content in sorted(contents.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    digest.update(json.dumps([PACKAGES, _PICK, _LEAVE, _LINKS, _MOUNT_POINTS, BOOT_MODULES], sort_keys=True).encode())
    return digest.hexdigest()


async def ensure_release(root: Path, scratch: Path, mode: Mode, progress: ProgressSink) -> AgentRelease:
    """The release of this version of Perdure, from the cache below ``root`` or built in ``scratch``."""
    wanted = sources_digest()
    for release in releases(root):
        if release.sources_digest == wanted:
            await asyncio.to_thread(_seal, release.directory)
            return release
    picked = await _ensure_packages(root / "cache", scratch, mode, progress)
    progress(Progress(Step.AGENT_DISK, "Making the agent disk"))
    built = await _build(picked, scratch, mode)
    final = root / "agents" / built.digest
    if not final.is_dir():
        files.make_dir(final.parent)
        await asyncio.to_thread(files.publish_dir, built.directory, final)
    return load_release(final)


def releases(root: Path) -> Iterator[AgentRelease]:
    folder = root / "agents"
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if (path / _RELEASE).is_file():
            yield load_release(path)


def load_release(directory: Path) -> AgentRelease:
    return AgentRelease(directory=directory, **json.loads((directory / _RELEASE).read_bytes()))


async def _ensure_packages(cache: Path, scratch: Path, mode: Mode, progress: ProgressSink) -> Path:
    """A tar of the picked files; fetched once for a list of packages and kept."""
    key = hashlib.sha256(json.dumps([PACKAGES, _PICK, _LEAVE]).encode()).hexdigest()[:16]
    picked = cache / f"agent-packages-{key}.tar"
    if picked.is_file():
        return picked
    progress(Progress(Step.AGENT_PACKAGES, "Fetching kernel, Python and tools for the agent disk"))
    whole = scratch / "agent-packages.tar"

    def log(line: str) -> None:
        progress(Progress(Step.AGENT_PACKAGES, line, log=True))

    tree = Tree("extract", PACKAGES, whole, scratch)
    await make_tree(tree, mode, what="Fetching the agent disk's packages with mmdebstrap", on_line=log)
    part = scratch / picked.name
    await asyncio.to_thread(_pick, whole, part)
    whole.unlink()
    files.make_dir(cache)
    files.DISK.sync_file(part)
    files.rename(part, picked)
    return picked


def _pick(whole: Path, part: Path) -> None:
    with tarfile.open(whole) as source, tarfile.open(part, "w") as target:
        for member in source:
            name = member.name.removeprefix("./")
            wanted = any(fnmatch.fnmatch(name, pattern) for pattern in _PICK) or name == PACKAGE_HASHES
            if not wanted or any(fnmatch.fnmatch(name, pattern) for pattern in _LEAVE) or not (member.isreg() or member.issym()):
                continue
            member.name = name
            target.addfile(member, source.extractfile(member) if member.isreg() else None)


async def _build(picked: Path, scratch: Path, mode: Mode) -> AgentRelease:
    tree, output = scratch / "agent-tree", scratch / "agent-release"
    tree.mkdir()
    output.mkdir()
    await asyncio.to_thread(_fill, tree, picked)
    for applet in (await run([str(tree / "usr/bin/busybox"), "--list"], what="The agent disk's busybox", tail=1000)).split():
        link = tree / "usr/bin" / applet
        if not link.is_symlink() and not link.exists():
            link.symlink_to("busybox")
    version = _kernel_version(tree)
    await _run_inside(tree, "usr/bin/kmod", "depmod", "-b", str(tree), version)
    await _run_inside(
        # -B and -f: or the compiler would keep what its own imports had just written, stamped with times that the disk lacks.
        *(tree, "usr/bin/python3.13", "python3.13", "-S", "-B", "-m", "compileall", "-q", "-f"),
        *("--invalidation-mode", "unchecked-hash"),
        *("-s", str(tree), "-p", "/", str(tree / "usr/lib/python3.13"), str(tree / "opt/perdure")),
    )
    packages = _package_hashes(tree / PACKAGE_HASHES)
    (tree / PACKAGE_HASHES).unlink()
    kernel = next((tree / "boot").glob("vmlinuz-*")).read_bytes()
    shutil.rmtree(tree / "boot")
    initrd = await asyncio.to_thread(make_initrd, tree, version)
    disk_digest = await asyncio.to_thread(tree_digest, tree)
    release = AgentRelease(
        directory=output,
        digest=hashlib.sha256(f"{disk_digest}{hashlib.sha256(kernel).hexdigest()}".encode() + initrd).hexdigest(),
        agent_digest=disk_digest,
        kernel_digest=hashlib.sha256(kernel).hexdigest(),
        sources_digest=sources_digest(),
        kernel_version=version,
        agent_protocol=PROTOCOL,
        packages=packages,
    )
    await _make_disk(tree, output / "agent.raw", disk_digest, mode, scratch)
    files.create_file(output / "kernel", kernel, mode=0o444)
    files.create_file(output / "initrd", initrd, mode=0o444)
    described = {key: value for key, value in asdict(release).items() if key != "directory"}
    files.create_file(output / _RELEASE, json.dumps(described, indent=1).encode(), mode=0o444)
    await asyncio.to_thread(_seal, output)
    shutil.rmtree(tree)
    return release


def _seal(directory: Path) -> None:
    """Note what its files are, for whoever boots with them: of a release made by an earlier version, what they are now."""
    if not (directory / CHECKSUMS).is_file():
        facts = {name: file_facts(directory / name) for name in _FILES}
        files.write_file(directory / CHECKSUMS, checksums_to_json(facts), mode=0o444)


def _fill(tree: Path, picked: Path) -> None:
    for name in _MOUNT_POINTS:
        (tree / name).mkdir(parents=True)
    _unpack(picked, tree)
    for name, target in _LINKS.items():
        (tree / name).symlink_to(target)
    for name, path in guest_sources().items():
        copy = tree / "opt/perdure" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    for package in ("perdure", "perdure/wire"):
        (tree / "opt/perdure" / package / "__init__.py").touch()  # empty: the package's own import what the guest lacks
    own = assets()
    for name in ("rc", "agent", "down"):
        script = tree / "etc/perdure" / name
        script.parent.mkdir(exist_ok=True)
        script.write_bytes(own[name])
        script.chmod(0o755)
    (tree / "etc/inittab").write_bytes(own["inittab"])
    (tree / "etc/perdure-release").write_text(f"sources={sources_digest()}\n")
    (tree / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (tree / "etc/group").write_text("root:x:0:\ntty:x:5:\n")


def _unpack(picked: Path, tree: Path) -> None:
    """Files and links of our own tar. Not ``extractall``: its filters are missing in Debian 12's Python."""
    with tarfile.open(picked) as source:
        for member in source:
            path = tree / member.name
            if not path.resolve().is_relative_to(tree.resolve()):
                raise BuildFailed(f"The package file {member.name} would leave the agent disk.")
            path.parent.mkdir(parents=True, exist_ok=True)
            stream = source.extractfile(member) if member.isreg() else None
            if stream is None:
                path.symlink_to(member.linkname)
            else:
                path.write_bytes(stream.read())
                path.chmod(member.mode & 0o777)


def _kernel_version(tree: Path) -> str:
    versions = sorted(path.name for path in (tree / "usr/lib/modules").iterdir())
    if len(versions) != 1:
        raise BuildFailed(f"The agent disk must hold one kernel, but the packages brought {', '.join(versions) or 'none'}.")
    return versions[0]


async def _run_inside(tree: Path, program: str, *argv: str) -> None:
    """Run one of the tree's own programs on the host through its own loader: no chroot, no rights needed."""
    loader = tree / "usr/lib64/ld-linux-x86-64.so.2"
    await run(
        [str(loader), "--argv0", argv[0], "--library-path", str(tree / _LIBRARIES), str(tree / program), *argv[1:]],
        what=f"The agent disk's own {argv[0]}",
        env={
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONHOME": str(tree / "usr"),
            "LC_ALL": "C.UTF-8",
            "SOURCE_DATE_EPOCH": "0",
        },
    )


def _package_hashes(path: Path) -> dict[str, str]:
    pairs = (line.split(maxsplit=1) for line in path.read_text().splitlines())
    return {name.strip().removesuffix(".deb").replace("%3a", ":"): digest for digest, name in pairs}


def make_initrd(tree: Path, kernel_version: str) -> bytes:
    """The initrd for a tree: busybox, the modules that reach the agent disk, and our init."""
    entries = [cpio.directory(name) for name in ("bin", "dev", "modules", "proc", "root", "sys")]
    entries.append(cpio.character_device("dev/console", 5, 1))
    entries.append(cpio.file("bin/busybox", (tree / "usr/bin/busybox").read_bytes(), 0o755))
    for number, path in enumerate(_with_dependencies(tree / "usr/lib/modules" / kernel_version, BOOT_MODULES)):
        entries.append(cpio.file(f"modules/{number:02}-{path.name.split('.')[0]}.ko", _module_bytes(path)))
    entries.append(cpio.file("init", assets()["init"], 0o755))
    return cpio.archive(entries)


def _with_dependencies(modules: Path, names: tuple[str, ...]) -> list[Path]:
    """Files of the modules in loading order: what depmod says one needs comes before it. Built-in ones are left out."""
    needs: dict[str, tuple[str, list[str]]] = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        path, _, rest = line.partition(":")
        needs[path.rsplit("/", 1)[-1].split(".")[0].replace("-", "_")] = (path, rest.split())
    order: list[str] = []
    for name in names:
        if name in needs:
            path, dependencies = needs[name]
            order += [entry for entry in [*reversed(dependencies), path] if entry not in order]
        elif name not in (modules / "modules.builtin").read_text().replace("-", "_"):
            raise BuildFailed(f"The kernel {modules.name} has no module {name}, without which no disk can be reached.")
    return [modules / entry for entry in order]


def _module_bytes(path: Path) -> bytes:
    if path.suffix == ".xz":
        return lzma.decompress(path.read_bytes())
    if path.suffix == ".ko":
        return path.read_bytes()
    raise BuildFailed(f"The kernel module {path.name} is compressed in a way that this version of Perdure does not know.")


def tree_digest(tree: Path) -> str:
    """SHA-256 over paths, kinds, permission bits and contents; owners and times do not count."""
    digest = hashlib.sha256()
    for path in sorted(tree.rglob("*")):
        name = path.relative_to(tree).as_posix()
        if path.is_symlink():
            digest.update(f"l\0{name}\0{path.readlink()}\0".encode())
        elif path.is_dir():
            digest.update(f"d\0{name}\0".encode())
        else:
            content = path.read_bytes()
            digest.update(f"f\0{name}\0{path.stat().st_mode & 0o777:o}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


async def _make_disk(tree: Path, output: Path, digest: str, mode: Mode, scratch: Path) -> None:
    tar = scratch / "agent-tree.tar"
    await asyncio.to_thread(_pack, tree, tar)
    used = sum(max(path.lstat().st_size, 1024) for path in tree.rglob("*"))
    size_mib = (used * 115 // 100 >> 20) + 8
    # No journal: nothing ever writes to it.
    options = ("-O", "^has_journal,^resize_inode", "-m", "0", "-b", "4096", "-N", "4096")
    disk = Ext4(tar, output, f"{size_mib}M", LABEL, str(uuid.UUID(digest[:32])), options)
    await make_ext4(disk, mode, scratch, what="Making the agent disk's file system")
    tar.unlink()
    output.chmod(0o444)


def _pack(tree: Path, tar: Path) -> None:
    def as_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(tar, "w") as target:
        for path in sorted(tree.iterdir()):
            target.add(path, path.name, filter=as_root)
