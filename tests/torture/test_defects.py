"""The suite proves itself: each shipped defect is found within a bounded number of rounds, in which the product has none.

A defect is looked for where it is most likely to show; ``test_torture.py`` runs the same rounds without any.
"""

from __future__ import annotations

import pytest

from perdure.core.errors import InvalidRequest
from perdure.snapshots.segments import SegmentWriter
from tests.torture.defects import DEFECTS, switched_on
from tests.torture.suite import Plan, run

ROUNDS_MAX = 120
WHERE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no-fsync": (("cuts",), ("disk.dropped", "disk.torn", "disk.mixed")),
    "no-generation-check": (("late",), ()),
    "acknowledge-before-commit": (("cuts",), ("disk.kept",)),
    "gc-of-pinned-pack": (("store",), ()),
    "damage-believed": (("damage",), ("flip.segment",)),
    "layer-believed": (("damage",), ("flip.layer",)),
    "parent-forgotten": (("runs",), ("runs.parent-owed server",)),
    "gc-of-pinned": (("full",), ()),
    "mark-before-the-look": (("full",), ()),
    "mark-of-a-lost-capture": (("full",), ()),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("defect", DEFECTS)
async def test_a_defect_is_found(defect: str) -> None:
    kinds, points = WHERE.get(defect, (("cuts", "late"), ()))
    table = await run(Plan(ROUNDS_MAX, 23, defect, kinds, points, until_violation=True))
    assert table.violations, f"{ROUNDS_MAX} rounds did not find {defect}"
    print(f"{defect}: round {table.rounds}, {table.violations[0]}")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "defect",
    [
        "stale-overlay",
        pytest.param("acknowledge-before-commit", marks=pytest.mark.long),
        pytest.param("dead-disk-dropped", marks=pytest.mark.long),
    ],
)
async def test_a_defect_of_a_server_that_is_killed_is_found(defect: str) -> None:
    table = await run(Plan(40, 23, defect, ("kills",), until_violation=True))
    assert table.violations


def test_a_defect_is_gone_when_it_is_switched_off() -> None:
    before = SegmentWriter.sync
    with switched_on("no-fsync"):
        assert SegmentWriter.sync is not before
    assert SegmentWriter.sync is before


def test_at_least_eight_defects_are_shipped() -> None:
    assert len(DEFECTS) >= 8


def test_there_is_no_other_defect() -> None:
    with pytest.raises(InvalidRequest, match="There is no defect 'none-such'"), switched_on("none-such"):
        pass
