"""Named queries: the loader, and rules that every statement keeps."""

from __future__ import annotations

import re

import pytest

from perdure.db import queries
from perdure.db.migrations import HERE, head


def test_statements_are_named_and_described() -> None:
    found = queries.parse("a", "-- name: one\n-- says what\nselect 1;\n\n-- name: two\nselect\n  2;\n")
    assert found == {"a.one": "select 1", "a.two": "select\n  2"}


@pytest.mark.parametrize(
    ("text", "says"), [("select 1;", "before its first"), ("-- name: a\nselect 1;\n-- name: a\nselect 2;", "defined twice")]
)
def test_bad_files_are_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        queries.parse("a", text)


@pytest.mark.parametrize("name", sorted(queries.load()))
def test_no_statement_asks_for_the_time_but_by_perdure_now(name: str) -> None:
    text = queries.load()[name].lower()
    banned = r"(?<!perdure_)\bnow\(\)|(current|local|clock|statement|transaction)_?timestamp|current_date|localtime"
    assert not re.search(banned, text)


def test_revisions_are_numbered_without_gaps_and_have_their_sql() -> None:
    revisions = sorted((HERE / "versions").glob("[0-9]*.py"))
    assert [int(path.name[:4]) for path in revisions] == list(range(1, len(revisions) + 1))
    assert all(path.with_suffix(".sql").is_file() for path in revisions)
    assert head() == revisions[-1].name[:4]
