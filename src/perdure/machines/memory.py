"""Guest RAM of a running VMM process, read and written from the host.

``/proc/PID/pagemap`` (Linux: Documentation/admin-guide/mm/pagemap.rst) tells which pages of the private mapping are no longer
the base file's: present or swapped, and not a file page; and where the kernel has soft-dirty bits (``softdirty``), which of them
were written since a moment, swapped or not. Their bytes are read with process_vm_readv and written with process_vm_writev, many
scattered pages per call, for each call also hands over the interpreter's lock. Before and after it the process is asked for by
its pidfd: a number is given to another only after 32,000 more processes. All this needs the rights of a tracer, which a parent of
the same user has.

Page numbers are offsets into the RAM file divided by 4096: one backend is mapped once, whatever holes the guest sees.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from perdure.core.errors import InvalidRequest, MachineDied, MachineFailed
from perdure.machines import softdirty
from perdure.machines.driver import PAGE_SIZE, PageNumbers, Pages, WrittenPages
from perdure.machines.pageroom import make_room

_PRESENT = np.uint64(1 << 63)
_SWAPPED = np.uint64(1 << 62)
_FILE_PAGE = np.uint64(1 << 61)  # file-mapped or shared anonymous
_SOFT_DIRTY = np.uint64(softdirty.BIT)

_IOV_MAX = 1024  # iovecs per system call (UIO_MAXIOV)
_PAGEMAP_CHUNK = 1 << 20  # bytes of pagemap per read: 512 MiB of guest RAM
_MOVED_PAGES_MAX = 65536  # pages per call: 256 MiB, where the kernel moves at most 2 GiB
_SHARE_PAGES_MIN = 1024  # pages below which another thread is not worth its while
_ZEROS_PAGES = 256  # zeros written at once

_THREADS = min(4, os.cpu_count() or 1)
_readers = ThreadPoolExecutor(_THREADS, thread_name_prefix="perdure-memory")

_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)


_Entries = npt.NDArray[np.uint64]
_Mask = npt.NDArray[np.bool_]


class ProcessMemory:
    """Implements ``GuestMemory`` for one process. Its calls block: use a thread."""

    def __init__(self, pid: int, ram_inode: int, page_count: int, is_alive: Callable[[], bool]) -> None:
        """Find the mapping of the RAM file and open what is needed. Raises MachineFailed when it is not mapped."""
        self.page_count = page_count
        self._pid = pid
        self._is_alive = is_alive
        self._address = _find_mapping(pid, ram_inode, page_count * PAGE_SIZE)
        self._pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self._clear_refs = _open_clear_refs(pid)
        self._is_marked = False
        self._guard = threading.Lock()
        self._users = 0
        self._closing = self._closed = False

    def close(self) -> None:
        """Release the descriptors once no thread uses them; later calls raise MachineDied. Safe twice, never blocks."""
        with self._guard:
            self._closing = True
        self._release_if_unused()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the descriptors: one closed under a thread could be another file's by its next call."""
        with self._guard:
            if self._closing:
                raise MachineDied("The virtual machine has ended.")
            self._users += 1
        try:
            yield
        finally:
            with self._guard:
                self._users -= 1
            self._release_if_unused()

    def _release_if_unused(self) -> None:
        with self._guard:
            if self._closing and not self._closed and self._users == 0:
                self._closed = True
                os.close(self._pagemap)
                if self._clear_refs is not None:
                    os.close(self._clear_refs)

    def written_pages(self) -> PageNumbers:
        with self._in_use():
            return self._find(_are_written)[0]

    def scan(self) -> WrittenPages:
        with self._in_use():
            if not self._is_marked:
                return WrittenPages(self._find(_are_written)[0], None)
            return WrittenPages(*self._find(_are_written, _are_written_lately))

    def mark(self) -> bool:
        with self._in_use():
            self._is_marked = False
            if self._clear_refs is None:
                return False
            try:
                os.write(self._clear_refs, softdirty.CLEAR)
            except OSError:  # some of the bits may be cleared
                return False
            self._is_marked = True
            return True

    def touched_pages(self) -> PageNumbers:
        with self._in_use():
            return self._find(_are_touched)[0]

    def _find(self, *kinds: Callable[[_Entries], _Mask]) -> tuple[PageNumbers, ...]:
        """The pages of each kind, of the same look at each entry of the pagemap."""
        found: tuple[list[PageNumbers], ...] = tuple([np.empty(0, np.uint32)] for _ in kinds)
        first = self._address // PAGE_SIZE
        for start in range(0, self.page_count, _PAGEMAP_CHUNK // 8):
            count = min(_PAGEMAP_CHUNK // 8, self.page_count - start)
            data = os.pread(self._pagemap, count * 8, (first + start) * 8)
            if len(data) != count * 8:
                raise MachineDied("The virtual machine ended while its memory was read.")
            entries = np.frombuffer(data, dtype=np.uint64)
            for kind, pages in zip(kinds, found, strict=True):
                pages.append(np.flatnonzero(kind(entries)).astype(np.uint32) + np.uint32(start))
        return tuple(np.concatenate(pages) for pages in found)

    def read_pages(self, pages: PageNumbers, room: Pages | None = None) -> Pages:
        self._check(pages)
        content = room[: len(pages)] if room is not None and len(room) >= len(pages) else make_room(len(pages), ahead=False)
        with self._in_use():
            # The vCPUs stand still, so there is a processor for each thread.
            share = max(_SHARE_PAGES_MIN, -(-len(pages) // _THREADS))

            def read(at: int) -> None:
                self._move(_libc.process_vm_readv, pages[at : at + share], content.ctypes.data + at * PAGE_SIZE)

            if share >= len(pages):
                read(0)
            else:
                list(_readers.map(read, range(0, len(pages), share)))
        # The number could have passed to another process only after ours died, and then this says so.
        if not self._is_alive():
            raise MachineDied("The virtual machine ended while its memory was read.")
        return content

    def write_pages(self, pages: PageNumbers, content: Pages) -> None:
        self._check(pages)
        if content.shape != (len(pages), PAGE_SIZE) or content.dtype != np.uint8:
            raise InvalidRequest(f"page content of shape {content.shape} does not belong to {len(pages)} pages")
        if len(pages) == 0:
            return
        content = np.ascontiguousarray(content)
        with self._in_use():
            if not self._is_alive():
                raise MachineDied("The virtual machine has ended.")
            self._move(_libc.process_vm_writev, pages, content.ctypes.data)
        if not self._is_alive():
            raise MachineDied("The virtual machine ended while its memory was written.")

    def write_zeros(self, pages: PageNumbers) -> None:
        self._check(pages)
        zeros = np.zeros((min(len(pages), _ZEROS_PAGES), PAGE_SIZE), np.uint8)
        for at in range(0, len(pages), _ZEROS_PAGES):
            some = pages[at : at + _ZEROS_PAGES]
            self.write_pages(some, zeros[: len(some)])

    def _move(self, call: Callable[..., int], pages: PageNumbers, local_at: int) -> None:
        """Copy between scattered pages of the machine and one piece of ours, many per system call."""
        for at in range(0, len(pages), _MOVED_PAGES_MAX):
            self._move_some(call, pages[at : at + _MOVED_PAGES_MAX], local_at + at * PAGE_SIZE)

    def _move_some(self, call: Callable[..., int], pages: PageNumbers, local_at: int) -> None:
        starts, lengths = coalesce(pages)
        for i in range(0, len(starts), _IOV_MAX):
            remote = np.empty((len(starts[i : i + _IOV_MAX]), 2), dtype=np.uint64)
            remote[:, 0] = starts[i : i + _IOV_MAX] * np.uint64(PAGE_SIZE) + np.uint64(self._address)
            remote[:, 1] = lengths[i : i + _IOV_MAX] * np.uint64(PAGE_SIZE)
            total = int(remote[:, 1].sum())
            local = np.array([[local_at, total]], dtype=np.uint64)
            got = call(self._pid, local.ctypes.data, 1, remote.ctypes.data, len(remote), 0)
            if got != total:
                reason = os.strerror(ctypes.get_errno()) if got < 0 else f"{got} of {total} bytes came"
                if not self._is_alive():
                    raise MachineDied("The virtual machine ended while its memory was copied.", internal=reason)
                raise MachineFailed("The virtual machine's memory cannot be copied.", internal=reason)
            local_at += total

    def _check(self, pages: PageNumbers) -> None:
        if len(pages) == 0:
            return
        if int(pages[-1]) >= self.page_count:
            raise InvalidRequest(f"page {int(pages[-1])} lies outside of a machine with {self.page_count} pages")
        if len(pages) > 1 and not bool(np.all(pages[1:] > pages[:-1])):
            raise InvalidRequest("page numbers must be ascending and unique")


def coalesce(pages: PageNumbers) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Runs of neighbouring pages: first numbers and lengths. ``pages`` ascending and unique."""
    if len(pages) == 0:
        return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.uint64)
    wide = pages.astype(np.uint64)
    breaks = np.flatnonzero(wide[1:] != wide[:-1] + np.uint64(1)) + 1
    edges = np.concatenate(([0], breaks, [len(wide)]))
    return wide[edges[:-1]], np.diff(edges).astype(np.uint64)


def _are_touched(entries: _Entries) -> _Mask:
    touched: _Mask = (entries & (_PRESENT | _SWAPPED)) != 0
    return touched


def _are_written(entries: _Entries) -> _Mask:
    written: _Mask = _are_touched(entries) & ((entries & _FILE_PAGE) == 0)
    return written


def _are_written_lately(entries: _Entries) -> _Mask:
    lately: _Mask = _are_written(entries) & ((entries & _SOFT_DIRTY) != 0)
    return lately


def _open_clear_refs(pid: int) -> int | None:
    """None where nobody can tell what is written: of a process of another user, say."""
    if not softdirty.works():
        return None
    try:
        return os.open(f"/proc/{pid}/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _find_mapping(pid: int, inode: int, size: int) -> int:
    """Address of the mapping of that inode from offset 0 over ``size`` bytes; adjacent pieces count as one.

    Only the inode is compared: on some file systems (btrfs, overlayfs) the device number in maps differs from stat's.
    """
    start = end = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if int(fields[4]) != inode or inode == 0:
            continue
        low, high = (int(part, 16) for part in fields[0].split("-"))
        offset = int(fields[2], 16)
        if offset == 0:
            start, end = low, high
        elif low == end and offset == low - start:
            end = high
        if end - start == size:
            return start
    raise MachineFailed(
        "The virtual machine has not mapped its memory as expected.", internal=f"pid {pid}, inode {inode}, {size} bytes"
    )
