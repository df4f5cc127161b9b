"""Cursors survive their way through a caller, and what is no cursor is told."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.errors import InvalidRequest
from perdure.core.paging import WHOLE, Page, Place, cut, seq_cursor, seq_of

FIRST = datetime(2026, 1, 1, tzinfo=UTC)
places = st.builds(
    Place,
    st.datetimes(min_value=datetime(1970, 1, 1), max_value=datetime(2999, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001
    st.from_regex(r"[a-z]{2,3}_[0-9a-z]{26}", fullmatch=True),
)


@given(places)
def test_a_cursor_leads_back_to_its_place(place: Place) -> None:
    assert Place.of(place.cursor()) == place


@given(st.integers(0, 10**17))
def test_a_numbered_cursor_leads_back_to_its_number(seq: int) -> None:
    assert seq_of(seq_cursor(seq)) == seq


@given(st.text())
def test_whatever_else_comes_is_refused_in_a_sentence(text: str) -> None:
    for read in (Place.of, seq_of):
        try:
            read(text)
        except InvalidRequest as error:
            assert error.hint


TOO_LATE = "OTk5OTk5OTk5OTk5OTk5OTk5LndzXzE"  # a year that there is not


@pytest.mark.parametrize("cursor", ["", "é", "a", "MTIz", Place(FIRST, "ws_1").cursor()[:-2] + "!", TOO_LATE])
def test_no_cursor_of_a_list_by_time(cursor: str) -> None:
    with pytest.raises(InvalidRequest, match="not a cursor"):
        Place.of(cursor)


def test_a_cursor_of_another_kind_of_list_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        seq_of(Place(FIRST, "ws_1").cursor())
    with pytest.raises(InvalidRequest):
        Place.of(seq_cursor(5))


@given(st.lists(places, unique=True, max_size=30), st.lists(places, max_size=10), st.sets(st.integers(0, 29)), st.integers(1, 7))
def test_who_pages_sees_each_that_stays_once(first: list[Place], later: list[Place], doomed: set[int], limit: int) -> None:
    """Items come and go between pages: those that were there all the time are seen, once each, in order."""

    def order(items: list[Place]) -> list[Place]:
        return sorted(set(items), key=lambda one: (one.at, one.id))

    going = {place for index, place in enumerate(first) if index in doomed}
    there, seen, page, rounds = order(first), list[Place](), Page(limit), 0
    while True:
        found = cut([one for one in there if page.holds(one)][: page.sought], page, lambda one: one)
        assert len(found.items) <= limit
        seen += found.items
        if found.next_cursor is None:
            break
        page = Page(limit, Place.of(found.next_cursor))
        rounds += 1
        there = order([one for one in there if one not in going] + later[:rounds])
    assert seen == order(seen), "in order, and none twice"
    assert set(first) - going <= set(seen)


def test_the_whole_list_is_one_page() -> None:
    items = [Place(FIRST + timedelta(seconds=count), "ws_1") for count in range(3)]
    assert cut(items, WHOLE, lambda one: one).next_cursor is None
    assert cut(items, Page(3), lambda one: one).next_cursor is None
    assert cut(items, Page(2), lambda one: one).items == items[:2]
