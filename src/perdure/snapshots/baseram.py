"""The RAM file that a machine's memory is mapped over: an image's golden, or a private base."""

from __future__ import annotations

import mmap
import os
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from perdure.core.errors import InvalidRequest
from perdure.core.files import data_extents
from perdure.machines.driver import PAGE_SIZE, PageNumbers, Pages


class BaseRam:
    """The immutable file that guest RAM is mapped over, read-only."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            about = os.fstat(fd)
            size = about.st_size
            if size == 0 or size % PAGE_SIZE:
                raise InvalidRequest(f"{path.name} is not a memory image: its size is {size} bytes.")
            self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        finally:
            os.close(fd)
        self.path = path
        self._identity = about.st_dev, about.st_ino
        self.page_count = size // PAGE_SIZE
        self.pages: Pages = np.frombuffer(self._map, np.uint8).reshape(self.page_count, PAGE_SIZE)

    def has_data(self, pages: PageNumbers) -> bool:
        """Whether any of these pages lies outside of the file's holes."""
        return bool(self._with_data[pages].any())

    @cached_property
    def _with_data(self) -> npt.NDArray[np.bool_]:
        """Looked up when it is first needed: a start does not need it. The name may be gone by then, or another file's."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return np.ones(self.page_count, bool)
        try:
            about = os.fstat(fd)
            if (about.st_dev, about.st_ino) != self._identity:
                return np.ones(self.page_count, bool)
            return _pages_with_data(fd, about.st_size)
        finally:
            os.close(fd)

    def read(self, pages: PageNumbers) -> Pages:
        """A copy of the base's content of these pages."""
        return self.pages[pages]


def pages_with_data(path: Path, count: int) -> npt.NDArray[np.bool_]:
    """Which pages of a RAM file lie outside of its holes. To read the others would fill the page cache with zeros."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _pages_with_data(descriptor, count * PAGE_SIZE)
    finally:
        os.close(descriptor)


def _pages_with_data(descriptor: int, size: int) -> npt.NDArray[np.bool_]:
    there = np.zeros(size // PAGE_SIZE, bool)
    for start, end in data_extents(descriptor, size):
        there[start // PAGE_SIZE : -(-end // PAGE_SIZE)] = True
    return there
