"""The RAM file that a machine's memory is mapped over: an image's golden, or a private base."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from perdure.core.errors import InvalidRequest
from perdure.machines.driver import PAGE_SIZE, PageNumbers, Pages


class BaseRam:
    """The immutable file that guest RAM is mapped over, read-only."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size == 0 or size % PAGE_SIZE:
                raise InvalidRequest(f"{path.name} is not a memory image: its size is {size} bytes.")
            self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        finally:
            os.close(fd)
        self.path = path
        self.page_count = size // PAGE_SIZE
        self.pages: Pages = np.frombuffer(self._map, np.uint8).reshape(self.page_count, PAGE_SIZE)

    def read(self, pages: PageNumbers) -> Pages:
        """A copy of the base's content of these pages."""
        return self.pages[pages]
