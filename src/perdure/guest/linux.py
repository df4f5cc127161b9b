"""System calls that Python's standard library lacks (or lacks before 3.12): namespaces, mount, clone3 into a cgroup, reseeding.

Each wrapper raises OSError with the call's name as the file name, so that a failure says what failed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import struct

CLONE_FS = 0x0000_0200
CLONE_NEWNS = 0x0002_0000
CLONE_NEWCGROUP = 0x0200_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWPID = 0x2000_0000
_CLONE_PIDFD = 0x1000
_CLONE_PARENT = 0x8000
_CLONE_INTO_CGROUP = 0x2_0000_0000
_SYS_CLONE3 = 435  # the same on every architecture
_CLONE_ARGS = struct.Struct("<11Q")

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x4_0000
_MNT_DETACH = 2

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_RB_POWER_OFF = 0x4321FEDC
_RB_AUTOBOOT = 0x0123_4567
_RNDADDENTROPY = 0x4008_5203
_RNDRESEEDCRNG = 0x5207
_FIFREEZE = 0xC004_5877
_TIOCSCTTY = 0x540E
_TIOCSWINSZ = 0x5414

# PyDLL keeps the interpreter's lock during a call: a clone must not return in a child that has lost it.
_libc = ctypes.PyDLL(None, use_errno=True)
_ZERO = ctypes.c_ulong(0)
#: For calls that may wait for a disk: others of the agent go on meanwhile.
_slow_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result


def unshare(flags: int) -> None:
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, flags: int) -> None:
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(flags)), "setns")


def mount(source: str, target: str, kind: str, flags: int = 0) -> None:
    arguments = (source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), None)
    _check(_libc.mount(*arguments), "mount")


def unmount_all(target: str) -> None:
    """Unmount whatever is mounted there, one above the other."""
    while _libc.umount2(os.fsencode(target), ctypes.c_int(_MNT_DETACH)) == 0:
        continue
    if ctypes.get_errno() not in (errno.EINVAL, errno.ENOENT):  # else nothing is mounted there
        _check(-1, "umount2")


def become_root(directory: str) -> None:
    """Make a directory the root of this process's own mount namespace, and let go of everything outside of it.

    Unlike chroot(2) this leaves no way back: neither through ``..`` nor for who enters the namespace.
    """
    mount("none", "/", "none", MS_REC | MS_PRIVATE)
    mount(directory, directory, "none", MS_BIND | MS_REC)  # pivot_root wants a mount
    os.chdir(directory)
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", ctypes.c_int(_MNT_DETACH)), "umount2")
    os.chdir("/")


def set_name(name: str) -> None:
    """The name that ps shows for this process; 15 bytes at most."""
    _check(_libc.prctl(_PR_SET_NAME, name.encode(), _ZERO, _ZERO, _ZERO), "prctl")


def die_with_parent() -> None:
    _check(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), _ZERO, _ZERO, _ZERO), "prctl")


def link_unnamed(fd: int, path: str) -> None:
    """Give a file opened with O_TMPFILE a name (linkat with AT_EMPTY_PATH; needs no /proc)."""
    _check(_libc.linkat(fd, b"", _AT_FDCWD, os.fsencode(path), _AT_EMPTY_PATH), "linkat")


def sync_file_system(fd: int) -> None:
    """Write out the file system that a file is on (syncfs)."""
    _check(_slow_libc.syncfs(ctypes.c_int(fd)), "syncfs")


def watch_files() -> int:
    """A new inotify(7) instance; reading its descriptor never waits."""
    return _check(_libc.inotify_init1(ctypes.c_int(os.O_NONBLOCK | os.O_CLOEXEC)), "inotify_init1")


def watch_directory(fd: int, path: str, mask: int) -> int:
    """Watch a directory too; returns its number, which is the same for one that is watched already."""
    number: int = _slow_libc.inotify_add_watch(ctypes.c_int(fd), os.fsencode(path), ctypes.c_uint32(mask))
    if number < 0:
        reason = ctypes.get_errno()
        raise OSError(reason, os.strerror(reason), path)
    return number


def unwatch_directory(fd: int, number: int) -> None:
    """Safe when the directory is gone and its number with it."""
    _libc.inotify_rm_watch(ctypes.c_int(fd), ctypes.c_int(number))


def freeze_files(path: str) -> None:
    """Write the file system at ``path`` out, empty its journal, and let nobody write to it any more (ioctl FIFREEZE)."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _FIFREEZE, 0)
    finally:
        os.close(fd)


def take_terminal(fd: int) -> None:
    """Make a terminal the controlling one of the caller's new session."""
    fcntl.ioctl(fd, _TIOCSCTTY, 0)


def set_terminal_size(fd: int, rows: int, cols: int) -> None:
    """Its foreground processes get SIGWINCH, if it changed."""
    fcntl.ioctl(fd, _TIOCSWINSZ, struct.pack("4H", rows, cols, 0, 0))


def power_off() -> None:
    _check(_libc.reboot(ctypes.c_int(_RB_POWER_OFF)), "reboot")


def restart() -> None:
    _check(_libc.reboot(ctypes.c_int(_RB_AUTOBOOT)), "reboot")


def fork_for_parent(cgroup_fd: int | None) -> tuple[int, int]:
    """fork(2) whose child is the caller's parent's own, and begins life inside a cgroup: (pid, pidfd), (0, -1) in the child.

    Writing to cgroup.procs instead waits for an RCU grace period, which costs an emulated guest 10 to 20 ms. The child gets
    none of Python's after-fork care: caller and child have no threads and no use for locks.
    """
    pidfd = ctypes.c_int(-1)
    flags = _CLONE_PIDFD | _CLONE_PARENT | (_CLONE_INTO_CGROUP if cgroup_fd is not None else 0)
    arguments = _CLONE_ARGS.pack(flags, ctypes.addressof(pidfd), 0, 0, 0, 0, 0, 0, 0, 0, cgroup_fd or 0)
    pid = _libc.syscall(_SYS_CLONE3, arguments, ctypes.c_size_t(len(arguments)))
    if pid == 0:
        return 0, -1
    _check(pid, "clone3")
    return pid, pidfd.value


def add_entropy(seed: bytes) -> None:
    """Credit fresh entropy to the kernel and make its generator use it at once."""
    fd = os.open("/dev/random", os.O_WRONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _RNDADDENTROPY, struct.pack("ii", len(seed) * 8, len(seed)) + seed)
        fcntl.ioctl(fd, _RNDRESEEDCRNG)
    finally:
        os.close(fd)
