"""Whether the kernel tells which pages of a process were written since a moment (soft-dirty bits), found out by trying.

Writing 4 to ``/proc/PID/clear_refs`` clears the bits of a process; bit 55 of an entry of its pagemap is set again by the next
write to the page (Linux: Documentation/admin-guide/mm/soft-dirty.rst). A kernel without CONFIG_MEM_SOFT_DIRTY takes the 4 all the
same and never sets a bit, and one that is not what it says could do either; so nothing but a trial is believed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from pathlib import Path

BIT = 1 << 55
CLEAR = b"4"

_PAGES = 3


@cache
def works() -> bool:
    """Tried once in a process, on a little memory of its own. On any error the answer is no."""
    try:
        return _tells_writes()
    except OSError:
        return False


def _tells_writes() -> bool:
    """With a private mapping of a file, as guest RAM is one."""
    file = os.memfd_create("perdure-soft-dirty", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, _PAGES * mmap.PAGESIZE)
        with mmap.mmap(file, _PAGES * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE) as area:
            for page in range(_PAGES):
                area[page * mmap.PAGESIZE] = 1
            if _bits(area) != [True] * _PAGES:
                return False
            Path("/proc/self/clear_refs").write_bytes(CLEAR)
            if any(_bits(area)):
                return False
            area[mmap.PAGESIZE] = 2
            return _bits(area) == [False, True, False]
    finally:
        os.close(file)


def _bits(area: mmap.mmap) -> list[bool]:
    first = ctypes.addressof(ctypes.c_char.from_buffer(area)) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        data = os.pread(pagemap.fileno(), 8 * _PAGES, 8 * first)
    if len(data) != 8 * _PAGES:
        return []
    return [bool(int.from_bytes(data[at : at + 8], "little") & BIT) for at in range(0, len(data), 8)]
