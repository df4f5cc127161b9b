"""Long lists in pages. A cursor names the last item that was seen, not how many: what is made or deleted meanwhile neither
repeats an item nor hides one. Cursors are opaque to callers; a bad one is told. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Generic, Self, TypeVar

from perdure.core import base64url
from perdure.core.errors import InvalidRequest

Item = TypeVar("Item")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_PLACE = re.compile(r"(-?[0-9]{1,18})\.([0-9a-z_]{1,64})")
_SEQ = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where an item stands in a list that is ordered by when its items were made, then by id."""

    at: datetime
    id: str

    def cursor(self) -> str:
        return _encode(f"{(self.at - _EPOCH) // _MICROSECOND}.{self.id}")

    @classmethod
    def of(cls, cursor: str) -> Self:
        """Raises InvalidRequest for what is no cursor of such a list."""
        match = _PLACE.fullmatch(_decode(cursor))
        if match is None:
            raise _bad(cursor)
        try:
            return cls(_EPOCH + int(match[1]) * _MICROSECOND, match[2])
        except OverflowError as error:
            raise _bad(cursor) from error


@dataclass(frozen=True, slots=True)
class Page:
    """At most ``limit`` items (None: all) behind ``after`` (None: from the first)."""

    limit: int | None = None
    after: Place | None = None

    @property
    def sought(self) -> int | None:
        """How many a service looks for: one more than is shown tells whether there is a next page."""
        return None if self.limit is None else self.limit + 1

    @property
    def after_at(self) -> datetime | None:
        return None if self.after is None else self.after.at

    @property
    def after_id(self) -> str | None:
        return None if self.after is None else self.after.id

    def holds(self, place: Place) -> bool:
        """Whether an item at this place comes behind ``after``."""
        return self.after is None or (place.at, place.id) > (self.after.at, self.after.id)


WHOLE = Page()


@dataclass(frozen=True, slots=True)
class Cut(Generic[Item]):
    """A page of a list: ``next_cursor`` is None on its last one."""

    items: Sequence[Item]
    next_cursor: str | None


def cut(found: Sequence[Item], page: Page, place: Callable[[Item], Place]) -> Cut[Item]:
    """A page out of what was found for it, which is ``page.sought`` items where there are so many."""
    if page.limit is None or len(found) <= page.limit:
        return Cut(found, None)
    shown = found[: page.limit]
    return Cut(shown, place(shown[-1]).cursor())


def seq_cursor(seq: int) -> str:
    """The cursor of a list that is numbered without gaps."""
    return _encode(str(seq))


def seq_of(cursor: str) -> int:
    """Raises InvalidRequest for what is no cursor of such a list."""
    text = _decode(cursor)
    if _SEQ.fullmatch(text) is None:
        raise _bad(cursor)
    return int(text)


def _encode(text: str) -> str:
    return base64url.encode(text.encode())


def _decode(cursor: str) -> str:
    try:
        return base64url.decode(cursor).decode("ascii")
    except ValueError as error:  # no base64, or no ASCII in it
        raise _bad(cursor) from error


def _bad(cursor: str) -> InvalidRequest:
    shown = cursor if len(cursor) <= 80 else cursor[:79] + "…"
    return InvalidRequest(
        f"{shown!r} is not a cursor of this list.", hint="Use the next_cursor of the page before, or none for the first page."
    )
