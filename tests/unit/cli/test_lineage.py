"""How the tree of snapshots is drawn."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.cli.lineage import tree
from perdure.wire import public

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def place(name: str, parent: str | None, *, head: bool = False) -> public.SnapshotPlace:
    return public.SnapshotPlace(
        id=name,
        workspace_id="ws_a",
        parent_id=parent,
        name=None,
        reason="automatic",
        generation=1,
        has_memory=True,
        quiesced=True,
        memory_bytes=0,
        memory_total_bytes=0,
        disk_bytes=0,
        disk_total_bytes=0,
        pause_s=0.0,
        created_at=NOW,
        is_head=head,
        kept=[],
        branches=[],
        references=[],
        own_bytes=None,
        shared_bytes=None,
        total_bytes=None,
    )


def drawn(*found: public.SnapshotPlace) -> list[str]:
    return [lead + one.id for one, lead in tree(found)]


def test_a_line_stays_at_the_left() -> None:
    assert drawn(place("a", "elsewhere"), place("b", "a"), place("c", "b", head=True)) == ["a", "b", "c"]


def test_what_leaves_the_heads_line_is_moved_in_and_comes_before_it_goes_on() -> None:
    found = [
        place("a", None),
        place("b", "a"),
        place("c", "b"),
        place("d", "a", head=True),
        place("e", "b"),
        place("f", "e"),
    ]
    assert drawn(*found) == ["a", "├─b", "│ ├─c", "│ e", "│ f", "d"]


def test_a_line_of_thousands_and_a_ring_do_not_hurt() -> None:
    line = [place(str(n), str(n - 1) if n else None, head=n == 4999) for n in range(5000)]
    assert drawn(*line) == [str(n) for n in range(5000)]
    assert drawn(place("a", "b", head=True), place("b", "a")) == []


@given(st.lists(st.integers(-1, 30), max_size=30), st.integers(0, 30))
@settings(max_examples=200, deadline=None)
def test_every_snapshot_is_drawn_once_and_after_its_parent(parents: list[int], head: int) -> None:
    found = [place(str(n), str(min(p, n - 1)) if p >= 0 else None, head=n == head) for n, p in enumerate(parents)]
    order = [one.id for one, _ in tree(found)]
    assert sorted(order) == sorted(one.id for one in found)
    assert all(one.parent_id not in order or order.index(one.parent_id) < order.index(one.id) for one in found)
