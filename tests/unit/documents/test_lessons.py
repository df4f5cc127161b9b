"""Every complaint of the lessons page names tests that exist, or says that there is none yet."""

from __future__ import annotations

import re

from tests.unit.documents.test_durability import ROOT, rows

PAGE = ROOT / "docs/lessons.md"
COMPLAINTS = 30


def test_every_complaint_names_a_test_or_says_that_there_is_none_yet() -> None:
    found = rows(PAGE.read_text())
    assert sorted(int(row.split("|")[1]) for row in found) == list(range(1, COMPLAINTS + 1))
    assert [row for row in found if not re.search(r"tests/[\w/]+\.py::\w+|\*Not yet\*: ", row.split("|")[5])] == []
