"""The hash chain: whatever is changed, left out, put in or turned around is found."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.journal.chain import Link, check, link_hash
from perdure.journal.entries import canonical

START = datetime(2026, 1, 1, tzinfo=UTC)


def chain(count: int) -> list[Link]:
    links: list[Link] = []
    for seq in range(1, count + 1):
        body = canonical({"n": seq, "text": "ü"})
        link = Link("ten_a", "ws_a", seq, START + timedelta(seconds=seq), "running", seq, body, "")
        links.append(replace(link, hash=link_hash(links[-1].hash if links else "", link)))
    return links


def test_a_whole_chain_holds() -> None:
    assert check(chain(5)) == []
    assert check([]) == []


@pytest.mark.parametrize(
    "change",
    [
        {"tenant_id": "ten_b"},
        {"workspace_id": "ws_b"},
        {"kind": "waking"},
        {"generation": 4},
        {"body": '{"n":4}'},
        {"at": START + timedelta(seconds=3, microseconds=1)},
        {"hash": "0" * 64},
    ],
)
def test_any_changed_field_is_found(change: dict[str, object]) -> None:
    links = chain(5)
    links[2] = replace(links[2], **change)  # type: ignore[arg-type]
    assert check(links)[0].seq in {3, 4}


def test_a_missing_first_middle_or_swapped_entry_is_found() -> None:
    links = chain(5)
    assert check(links[1:])[0].seq == 2
    assert check(links[:2] + links[3:])[0].reason == "Entry 3 is missing."
    assert check([links[0], links[2], links[1], *links[3:]])


def test_a_rehashed_forgery_breaks_at_the_next_entry() -> None:
    links = chain(5)
    forged = replace(links[2], body=canonical({"n": 99}))
    links[2] = replace(forged, hash=link_hash(links[1].hash, forged))
    assert [found.seq for found in check(links)] == [4]


@given(
    st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()))
)
def test_canonical_text_does_not_depend_on_order(body: dict[str, object]) -> None:
    assert canonical(body) == canonical(dict(reversed(body.items())))
    assert canonical(body).isascii()
