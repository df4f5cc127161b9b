"""The guest's page cache, which a sleep would store like any other memory.

A cache of moderate size is worth its storage: who wakes has it warm. A large one is mostly files read once, and they are on the
disk anyway. Freed pages are zeroed by the kernel (``init_on_free``), so that they vanish from the snapshot. What is dropped
includes cache that the golden snapshot holds too, and that costs: zeros over it must be stored and written at the next wake.
"""

from __future__ import annotations

from perdure.guest.world import read_file, write_file

_DROP_CACHES = "/proc/sys/vm/drop_caches"


def droppable_bytes() -> int:
    """Cached content of files that no process has mapped; 0 when nobody knows."""
    sizes = {}
    for line in read_file("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        sizes[name] = rest
    try:
        held, mapped = (sizes["Active(file)"], sizes["Inactive(file)"]), sizes["Mapped"]
        return max(0, sum(int(size.split()[0]) for size in held) - int(mapped.split()[0])) * 1024
    except (KeyError, IndexError, ValueError):
        return 0


def drop() -> None:
    """Drop cached file content that is clean and unmapped. Names and attributes stay: they are small and slow to get again."""
    write_file(_DROP_CACHES, "1")
