"""The jail around a VMM process: bubblewrap namespaces, a read-only system, its own user.

Inside there is no network, no other process, nothing of the host's file system but ``/usr`` and what QEMU is made of, and
one writable directory: a private tmpfs that dies with the process. Disks, base RAM and device states come as descriptors.

Two ways in, tried in this order by running QEMU in them once:

* ``own user`` (as root): the process first becomes an unprivileged user, which then makes the namespaces.
* ``plain``: the namespaces belong to the user that runs Perdure. As root this means that the VMM is root outside of its user
  namespace, without any capability.

Older QEMUs open the base for writing though they map it privately. Its mode is 0444, so they are given CAP_DAC_OVERRIDE,
which in a user namespace reaches files of the namespace's own user only.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from perdure.core.errors import HostUnfit
from perdure.machines import process

#: An unprivileged user and group for VMMs of a server that runs as root; named nowhere, owns nothing.
VMM_UID = 60999
PROBE_DEADLINE_S = 30.0
KVM_DEVICE = Path("/dev/kvm")
_INSTALL_HINT = "Install bubblewrap: apt-get install --no-install-recommends bubblewrap"

JailPolicy = Literal["auto", "require", "off"]


class JailKind(StrEnum):
    OWN_USER = "own-user"
    PLAIN = "plain"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which jails work on this host with this QEMU, best first, and why the others do not."""

    kinds: tuple[JailKind, ...]
    jail_missing: str = ""
    own_user_missing: str = ""


@dataclass(frozen=True, slots=True)
class Jail:
    """How one VMM is wrapped."""

    kind: JailKind
    system: tuple[Path, ...]  # directories outside /usr that QEMU is made of
    override_modes: bool = False  # QEMU needs to open a 0444 file of its own user for writing
    kvm: bool = False


def wrap(jail: Jail, argv: Sequence[str], *, info_fd: int, block_fd: int) -> list[str]:
    """The whole command. In a jail the VMM is pid 1 of its namespace; its real pid is written to ``info_fd``, and it does not
    start before a byte comes on ``block_fd``, so that it is inside its cgroup from its first instruction."""
    if jail.kind is JailKind.NONE:
        return ["setpriv", "--pdeathsig", "KILL", "--no-new-privs", "--", *argv]
    own_user = jail.kind is JailKind.OWN_USER
    drop = ["setpriv", "--reuid", str(VMM_UID), "--regid", str(VMM_UID), *_groups(jail), "--pdeathsig", "KILL", "--"]
    command = [
        *(drop if own_user else []),
        "bwrap",
        *("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net", "--unshare-cgroup-try"),
        *("--as-pid-1", "--die-with-parent", "--new-session", "--hostname", "vmm"),
        *("--info-fd", str(info_fd), "--block-fd", str(block_fd)),
    ]
    if jail.override_modes:
        command += ["--uid", "0", "--gid", "0", "--cap-add", "CAP_DAC_OVERRIDE"]
    return [*command, *_mounts(jail), "--chdir", "/run/vmm", "--", *argv]


def kvm_for_everybody_or_a_group() -> bool:
    """Whether a VMM with a user of its own can open the device: by its mode, or as a member of its group, never root's."""
    try:
        status = KVM_DEVICE.stat()
    except FileNotFoundError:
        return False
    return status.st_mode & 0o006 == 0o006 or (status.st_gid != 0 and status.st_mode & 0o060 == 0o060)


def _groups(jail: Jail) -> list[str]:
    """Only the group that may open /dev/kvm, and only when it is used."""
    if jail.kvm and KVM_DEVICE.exists() and (group := KVM_DEVICE.stat().st_gid) != 0:
        return ["--groups", str(group)]
    return ["--clear-groups"]


def _mounts(jail: Jail) -> list[str]:
    mounts = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            mounts += ["--symlink", os.readlink(path), str(path)]  # noqa: PTH115
        elif path.is_dir():
            mounts += ["--ro-bind", str(path), str(path)]
    if Path("/etc/ld.so.cache").exists():
        mounts += ["--ro-bind", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for directory in jail.system:
        mounts += ["--ro-bind", str(directory), str(directory)]
    mounts += ["--proc", "/proc", "--dev", "/dev"]
    if jail.kvm:
        mounts += ["--dev-bind", str(KVM_DEVICE), "/dev/kvm"]
    return [*mounts, "--perms", "0700", "--tmpfs", "/run/vmm", "--remount-ro", "/"]


async def judge(policy: JailPolicy, qemu: Path, system: tuple[Path, ...]) -> Verdict:
    """Find out by trying. Raises HostUnfit when the policy requires a jail and none works."""
    if policy == "off":
        return Verdict(
            (JailKind.NONE,), "the jail is switched off (PERDURE_JAIL=off)", "the jail is switched off (PERDURE_JAIL=off)"
        )
    is_root = os.geteuid() == 0
    own_user_missing = "" if is_root else "perdure runs as an ordinary user, and so do its VMMs"
    kinds: list[JailKind] = []
    failure = ""
    if shutil.which("bwrap") is None:
        failure = f"bubblewrap is not installed. {_INSTALL_HINT}"
    else:
        for kind in (JailKind.OWN_USER, JailKind.PLAIN):
            if kind is JailKind.OWN_USER and not is_root:
                continue
            failure = await _attempt(Jail(kind, system), qemu)
            if not failure:
                kinds.append(kind)
            elif kind is JailKind.OWN_USER:
                own_user_missing = failure
    if not kinds:
        if policy == "require":
            raise HostUnfit(
                f"The jail around virtual machines does not work on this host: {failure}",
                hint=f"{_INSTALL_HINT}; or set PERDURE_JAIL=auto.",
            )
        return Verdict((JailKind.NONE,), failure, own_user_missing or failure)
    return Verdict(tuple(kinds), "", own_user_missing)


async def _attempt(jail: Jail, qemu: Path) -> str:
    """Empty when QEMU starts in this jail, else the reason."""
    info_read, info_write = os.pipe2(os.O_CLOEXEC)
    block_read, block_write = os.pipe2(os.O_CLOEXEC)
    try:
        os.write(block_write, b"x")
        argv = wrap(jail, [str(qemu), "--version"], info_fd=info_write, block_fd=block_read)
        status, output = await process.run(argv, PROBE_DEADLINE_S, fds=(info_write, block_read))
    except HostUnfit as error:
        return error.message
    finally:
        for fd in (info_read, info_write, block_read, block_write):
            os.close(fd)
    return "" if status == 0 else (output or f"exit status {status}").splitlines()[-1]
