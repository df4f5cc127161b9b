"""Room for copies of guest pages, made before it is needed.

A copy into fresh memory spends two thirds of its time in page faults, and a machine stands still meanwhile. So the room is mapped
and filled by the kernel ahead (MADV_POPULATE_WRITE, Linux 5.14; in huge pages where they are on), and a little of it is kept for
the next copy, for on a host that is itself a virtual machine new memory may be dear. The rest goes back to the system as soon as
its last array is gone: the C library would keep such pieces in its threads' heaps.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import weakref

import numpy as np

from perdure.core.errors import Unavailable
from perdure.machines.driver import PAGE_SIZE, Pages

_HUGE_BYTES = 2 << 20
_KEPT_BYTES = 64 << 20
_MADV_POPULATE_WRITE = 23

# CDLL lets other threads run during the call: to fill 300 MB takes the kernel 50 ms and more.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def make_room(count: int, *, ahead: bool) -> Pages:
    """Room for ``count`` pages, of any content. ``ahead``: let the kernel fill it now. Raises Unavailable without memory."""
    size = -(-max(1, count) * PAGE_SIZE // _HUGE_BYTES) * _HUGE_BYTES
    area = _kept.take(size)
    if area is None:
        area = _map(size)
        if ahead:
            _libc.madvise(_address(area), size, _MADV_POPULATE_WRITE)  # an older kernel refuses: then the copy fills it
    view = (ctypes.c_char * len(area)).from_address(_address(area))
    weakref.finalize(view, _kept.give, area).atexit = False
    room: Pages = np.frombuffer(memoryview(view).cast("B"), np.uint8)
    return room[: count * PAGE_SIZE].reshape(count, PAGE_SIZE)


def _map(size: int) -> mmap.mmap:
    try:
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise Unavailable(
            f"The host has no memory to copy {size >> 20} MiB of a machine's pages.",
            hint="Let other workspaces sleep, or give the host more memory.",
        ) from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return area


def _address(area: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(area))


class _Kept:
    """Areas that wait for the next copy, the last used first."""

    def __init__(self) -> None:
        self._areas: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> mmap.mmap | None:
        with self._lock:
            for area in self._areas:
                if len(area) >= size:
                    self._areas.remove(area)
                    return area
        return None

    def give(self, area: mmap.mmap) -> None:
        with self._lock:
            self._areas.insert(0, area)
            while sum(map(len, self._areas)) > _KEPT_BYTES:
                self._areas.pop()


_kept = _Kept()
