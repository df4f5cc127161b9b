"""How a tree is drawn from the depths of a walk."""

from __future__ import annotations

import pytest

from perdure.cli.branches import leads


@pytest.mark.parametrize(
    ("depths", "drawn"),
    [
        ([], []),
        ([0], [""]),
        ([0, 1], ["", "└─ "]),
        ([0, 1, 1], ["", "├─ ", "└─ "]),
        ([0, 1, 2, 2, 1], ["", "├─ ", "│  ├─ ", "│  └─ ", "└─ "]),
        ([0, 1, 2, 3], ["", "└─ ", "   └─ ", "      └─ "]),
        ([0, 1, 2, 1, 2], ["", "├─ ", "│  └─ ", "└─ ", "   └─ "]),
    ],
)
def test_leads(depths: list[int], drawn: list[str]) -> None:
    assert leads(depths) == drawn
