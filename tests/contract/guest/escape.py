"""A program that tries, as root in a workspace, to get out of the group that it is frozen and killed by.

``python3 -c ESCAPE PID`` (PID: of another command) first ignores SIGTERM and leaves its session. From its own cgroup namespace
and those of process 1 and of PID, over every mount of cgroups that each can make, it writes its pid to every ``cgroup.procs``
and 0 to every ``cgroup.freeze``; it makes a group below its own and moves there; and it looks for the agent's root. Then it
prints one line of JSON (what it found out, in ``Tried``'s words) and counts in the file ``/run/count-PID`` of its own pid.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

ESCAPE = r"""
import ctypes, json, os, signal, sys

libc = ctypes.CDLL(None, use_errno=True)
MS_REMOUNT, MS_BIND = 32, 4096

def mount(source, target, kind, flags=0):
    return libc.mount(source, target.encode(), kind, ctypes.c_ulong(flags), None) == 0

def write(path, text):
    try:
        with open(path, "w") as file:
            file.write(text)
        return True
    except OSError:
        return False

def enter(namespace):
    with open(namespace) as file:
        os.setns(file.fileno(), os.CLONE_NEWCGROUP)

signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork():
    signal.pause()
os.setsid()
pid, wrote = str(os.getpid()), []
with open("/proc/self/ns/cgroup") as own:
    mount(None, "/sys/fs/cgroup", None, MS_REMOUNT | MS_BIND)
    places, namespaces = ["/sys/fs/cgroup"], ["/proc/1/ns/cgroup", f"/proc/{sys.argv[1]}/ns/cgroup"]
    namespaces.append(f"/proc/self/fd/{own.fileno()}")
    for number, namespace in enumerate(namespaces):
        place = f"/run/groups-{pid}-{number}"
        os.mkdir(place)
        enter(namespace)
        if mount(b"none", place, b"cgroup2"):
            places.append(place)
    os.mkdir(f"{place}/below")
    for namespace in namespaces:
        enter(namespace)
        for place in places:
            for path, _, _ in os.walk(place):
                write(f"{path}/cgroup.freeze", "0")
                for name in ("cgroup.procs", "cgroup.threads"):
                    if write(f"{path}/{name}", pid):
                        wrote.append([namespace, f"{path}/{name}"])
    enter(namespaces[-1])
with open("/proc/self/cgroup") as file:
    group = file.read().strip()
delegated = write(f"{places[-1]}/below/cgroup.procs", pid)
with open(f"/run/count-{pid}", "wb", buffering=0) as file:
    report = {"pid": int(pid), "group": group, "places": places, "wrote": wrote, "delegated": delegated}
    print(json.dumps(report), flush=True)
    number = 0
    while True:
        number += 1
        os.pwrite(file.fileno(), b"%016d" % number, 0)
"""


class Tried(NamedTuple):
    """What the program found out."""

    pid: int
    group: str
    """Where it was after trying to leave, as /proc/self/cgroup says it in its own namespace: ``0::/`` and what is
    below is its group, ``0::/..`` is not."""
    places: list[str]
    """Where it saw cgroups."""
    wrote: list[list[str]]
    """(namespace, file) for each ``cgroup.procs`` that took its pid."""
    delegated: bool
    """It could move to a group that it made below its own."""

    @property
    def escapes(self) -> list[list[str]]:
        """Where it was let in, but for its own group and what is below: it may have come back from there since."""
        return [[namespace, file] for namespace, file in self.wrote if not file.startswith(f"{self.places[-1]}/")]


def tried(line: str | bytes) -> Tried:
    fields: dict[str, Any] = json.loads(line)
    return Tried(**fields)
