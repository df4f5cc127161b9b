"""A stand-in for a workspace's kernel and init: namespaces on this host in which the real agent runs.

Run as root: ``guest_sandbox.py START_PY ROOT_DIR CGROUP CONTROL_FD DATA_FD SKEW_NS SHARED…``. Makes new mount, UTS, network, IPC
and PID namespaces, a user root of tmpfs with this host's programs (and what is SHARED) bound read-only, and, as process 1,
starts the agent and starts it again when it ends, as init does. Everything dies with this process.
"""

# ruff: noqa: PTH101, PTH102, PTH103, PTH112, PTH114, PTH115, PTH123, PTH211

import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys

CLONE = 0x00020000 | 0x04000000 | 0x40000000 | 0x08000000 | 0x20000000  # NS, UTS, NET, IPC, PID
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
libc = ctypes.CDLL(None, use_errno=True)

PASSWD = """root:x:0:0:root:/root:/bin/sh
agent:x:1000:1000:Agent:/home/agent:/bin/sh
nobody:x:65534:65534:nobody:/nonexistent:/bin/false
"""
GROUP = "root:x:0:\nagent:x:1000:\ntools:x:2000:agent\nnogroup:x:65534:\n"


def mount(source, target, kind=None, flags=0, data=None):
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    if libc.mount(*arguments[:3], ctypes.c_ulong(flags), arguments[3]) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"mount {target}")


def loopback_up():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = bytearray(struct.pack("16sh22x", b"lo", 0))
        fcntl.ioctl(sock, 0x8913, request)
        flags = struct.unpack_from("h", request, 16)[0] | 1
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh22x", b"lo", flags))


def build_root(root, shared):
    mount("tmpfs", root, "tmpfs", 0, "size=160m")
    for name in ("etc", "root", "home/agent", "tmp", "run", "proc", "dev", "var/tmp", "etc/ssh"):
        os.makedirs(f"{root}/{name}")
    os.chmod(f"{root}/tmp", 0o1777)
    os.chown(f"{root}/home/agent", 1000, 1000)
    mount("/dev", f"{root}/dev", None, MS_BIND | MS_REC)
    for name in ("usr", "bin", "sbin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
        elif os.path.isdir(f"/{name}"):
            os.mkdir(f"{root}/{name}")
            mount(f"/{name}", f"{root}/{name}", None, MS_BIND | MS_REC)
    for path in shared:
        if not os.path.isdir(f"{root}{path}"):
            os.makedirs(f"{root}{path}")
            mount(path, f"{root}{path}", None, MS_BIND | MS_REC)
    for name, text in (("passwd", PASSWD), ("group", GROUP), ("hostname", "golden\n"), ("hosts", "127.0.0.1\tlocalhost\n")):
        with open(f"{root}/etc/{name}", "w") as file:
            file.write(text)


def main():
    start, root, cgroup, control, data, skew, *shared = sys.argv[1:]
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)
    if libc.unshare(CLONE) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    child = os.fork()
    if child:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
        os.waitpid(child, 0)
        return
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    loopback_up()
    build_root(root, shared)
    mount("proc", "/proc", "proc")
    mount("tmpfs", "/run", "tmpfs")
    os.makedirs("/run/perdure")
    arguments = [f"--root={root}", f"--cgroup={cgroup}", f"--control-fd={control}", f"--data-fd={data}", f"--dry-system={skew}"]
    while True:
        agent = os.fork()
        if agent == 0:
            os.execv(sys.executable, [sys.executable, "-I", "-S", start, *arguments])
        ended = 0
        while ended != agent:
            ended, _ = os.wait()


main()
