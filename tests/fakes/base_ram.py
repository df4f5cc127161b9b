"""A small RAM file for a page log to lie on."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from perdure.machines.driver import PAGE_SIZE
from perdure.snapshots.baseram import BaseRam

RAM_PAGES = 200


def make_base(directory: Path, pages: int = RAM_PAGES) -> BaseRam:
    """Even pages hold noise, odd ones are zero."""
    content = np.random.default_rng(7).integers(0, 255, (pages, PAGE_SIZE), np.uint8)
    content[1::2] = 0
    path = directory / "ram.base"
    path.write_bytes(content.tobytes())
    return BaseRam(path)
