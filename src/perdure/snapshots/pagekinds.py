"""What captured pages are beside the base: equal, zero, sparse or dense. Pure functions of arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perdure.machines.driver import PAGE_SIZE, PageNumbers, Pages
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.pageindex import U32
from perdure.snapshots.pageread import Rows
from perdure.snapshots.segments import SPARSE_WORDS, WORDS_PER_PAGE

#: What is changed as a whole shows it here: two places in a page, and how many words of the two must differ. A page that is taken
#: for dense by mistake takes more room than it need, no more.
_LOOKED_AT = (slice(0, 64), slice(WORDS_PER_PAGE // 2, WORDS_PER_PAGE // 2 + 64))
_NEARLY_ALL = 48
_ZERO_PAGE = np.zeros((1, PAGE_SIZE), np.uint8)

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Classified:
    """Rows of captured pages that differ from the base, by what is stored of them."""

    zero: Rows
    sparse: Rows
    dense: Rows


def classify(base: BaseRam, written: PageNumbers, content: Pages, rows: Rows) -> Classified:
    words, pages = take(content, rows).view(np.uint64), written[rows]
    below = _below(base, pages).view(np.uint64)
    count = np.full(len(rows), WORDS_PER_PAGE, np.uint32)
    closely = np.flatnonzero(~_are_dense(words, below))
    count[closely] = _differing(words[closely], below[closely])
    zero = _zero_rows(words) & (count > 0)
    sparse = ~zero & (count > 0) & (count <= SPARSE_WORDS)
    return Classified(rows[zero], rows[sparse], rows[~zero & (count > SPARSE_WORDS)])


def _are_dense(words: npt.NDArray[np.uint64], below: npt.NDArray[np.uint64]) -> Mask:
    """Which rows differ from what is below nearly everywhere, as far as a few places tell."""
    first, second = (_differing(words[:, some], below[:, some]) for some in _LOOKED_AT)
    return (first >= _NEARLY_ALL) & (second >= _NEARLY_ALL)


def _below(base: BaseRam, pages: PageNumbers) -> Pages:
    """What the base has there. Its holes are not touched: each page of one would take a place in the page cache."""
    if base.has_data(pages):
        return take(base.pages, pages)
    return np.broadcast_to(_ZERO_PAGE, (len(pages), PAGE_SIZE))


def _differing(words: npt.NDArray[np.uint64], below: npt.NDArray[np.uint64]) -> U32:
    """In how many words each row differs from what is below."""
    count: U32 = np.bitwise_count(np.packbits(words != below, axis=1).view(np.uint64)).sum(axis=1, dtype=np.uint32)
    return count


def same_rows(some: Pages, others: Pages) -> Mask:
    equal: Mask = (some.view(np.uint64) == others.view(np.uint64)).all(axis=1)
    return equal


def take(content: Pages, rows: Rows | PageNumbers) -> Pages:
    """These rows in this order, without a copy where they are neighbours: to copy costs as much as all that is done with them."""
    if len(rows) and int(rows[-1]) - int(rows[0]) + 1 == len(rows) and bool((rows[1:] > rows[:-1]).all()):
        return content[int(rows[0]) : int(rows[-1]) + 1]
    return content[rows]


def _zero_rows(words: npt.NDArray[np.uint64]) -> Mask:
    """Which rows are all zero; looks closely only at those that begin with zeros."""
    zero = np.zeros(len(words), bool)
    candidates = np.flatnonzero((words[:, :8] == 0).all(axis=1))
    zero[candidates] = (words[candidates] == 0).all(axis=1)
    return zero
