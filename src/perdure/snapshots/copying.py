"""Between a machine's memory and a run: copies while it stands still, as short as possible, and what a restore writes.

Where the host can tell what is written (``GuestMemory.mark``), a checkpoint copies only what was written since the last one, and
its pause grows with that alone. Three rules keep it right. The machine stands still from the look at its pages to the mark that
follows at once; what is written after the mark, be it during the copy, is told next time. What is told counts only against the
index of the very capture that set the mark, and only once that is committed: after any failure the next capture copies all. And a
hibernation, after which nobody can ask the machine again, always copies all, and so mends what the log may have lost.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perdure.machines.driver import GuestMemory, PageNumbers, Pages
from perdure.machines.pageroom import make_room
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.pageindex import PageIndex
from perdure.snapshots.pagelog import LatelyWritten, StillPages
from perdure.snapshots.pageread import restore

#: What a guest may write between ``ready`` and the pause without making the copy slower: 8 MiB.
ROOM_TO_SPARE_PAGES = 2048


@dataclass(frozen=True, slots=True)
class Copied:
    """``pages`` are all that may differ from the base, whatever of them ``content`` has. ``is_marked``: the machine can tell what
    it writes from now on."""

    pages: PageNumbers
    content: Pages | StillPages | LatelyWritten
    is_marked: bool = False


def room_for(pages: PageNumbers) -> Pages:
    """For the pages written so far, and some that the guest writes until it stands still."""
    return make_room(len(pages) + ROOM_TO_SPARE_PAGES, ahead=True)


def room_ahead(memory: GuestMemory, *, lately: bool) -> Pages:
    """For what ``copy_for_checkpoint`` would copy now, and some more."""
    written = memory.scan()
    return room_for(written.lately if lately and written.lately is not None else written.pages)


def copy_for_checkpoint(memory: GuestMemory, room: Pages | None, timings: dict[str, float], *, lately: bool) -> Copied:
    """``lately``: what was written since the last mark is all that differs from the last index."""
    begun = time.perf_counter()
    written = memory.scan()
    is_marked = memory.mark()
    if lately and written.lately is not None:
        content = LatelyWritten(written.lately, memory.read_pages(written.lately, room))
        copied = Copied(written.pages, content, is_marked)
    else:
        copied = Copied(written.pages, memory.read_pages(written.pages, room), is_marked)
    timings["memory"] = ms(begun)
    return copied


def copy_for_hibernation(memory: GuestMemory) -> Copied:
    """The machine will never go on, so its pages are read while they are recorded."""
    pages = memory.written_pages()
    return Copied(pages, StillPages(memory, pages))


def write_memory(memory: GuestMemory, segments: Path, index: PageIndex, base: BaseRam) -> None:
    """Make the machine's memory what the index says, whatever it has touched of it before."""
    touched = memory.written_pages()
    stale = np.setdiff1d(touched, np.union1d(index.pages, index.zeros), assume_unique=True).astype(np.uint32)
    if len(stale):
        memory.write_pages(stale, base.read(stale))
    if len(index.zeros):
        memory.write_zeros(index.zeros)
    restore(segments, index, base, memory)


def ms(since: float) -> float:
    """Milliseconds since a reading of ``perf_counter``."""
    return (time.perf_counter() - since) * 1000
