"""Retention against a second opinion: reachability written as its definition, over random trees and random policies."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.core.ids import SnapshotId, WorkspaceId
from perdure.workspaces.model import Kept, SnapshotReason
from perdure.workspaces.retention import Entry, Holder, Tree, expendable, irremovable, nearest, way, why_kept

REASONS = st.sampled_from(SnapshotReason)


def snp(number: int | None) -> SnapshotId | None:
    return None if number is None else SnapshotId(f"snp_{number}")


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Any forest: parents that are gone, owners that are deleted, heads anywhere, also in another workspace's part."""
    count = draw(st.integers(0, 14))
    owners = [WorkspaceId(f"ws_{number}") for number in range(draw(st.integers(1, 4)))]
    entries = {}
    for number in range(count):
        parent = snp(draw(st.one_of(st.none(), st.integers(-1, number - 1))))  # -1: one that is gone
        entry = Entry(
            SnapshotId(f"snp_{number}"),
            draw(st.sampled_from(owners)),
            parent,
            draw(REASONS),
            is_named=draw(st.integers(0, 4)) == 0,
            is_going=draw(st.integers(0, 5)) == 0,
        )
        entries[entry.id] = entry
    standing = [key for key, entry in entries.items() if not entry.is_going]
    place = st.one_of(st.none(), st.sampled_from(standing)) if standing else st.none()
    holders = {
        owner: Holder(owner, f"name-{owner}", draw(place), draw(place), draw(st.one_of(st.none(), st.integers(0, 5))))
        for owner in owners
        if draw(st.integers(0, 3))
    }
    names = draw(st.lists(st.sampled_from(standing), max_size=2)) if standing else []
    return Tree(entries, holders, {name: ("execution exe_1",) for name in names})


def reachable(tree: Tree, default: int) -> set[SnapshotId]:
    """What must stay, one snapshot at a time, straight from the definition."""

    def ancestors(head: SnapshotId | None) -> list[SnapshotId]:
        found = []
        while head in tree.entries:
            assert head is not None
            found.append(head)
            head = tree.entries[head].parent_id
        return found

    def stays(one: Entry) -> bool:
        if any(holder.head == one.id for holder in tree.holders.values()) or tree.references.get(one.id):
            return True
        owner = tree.holders.get(one.workspace_id)
        if owner is None:
            return False
        if one.is_named or one.reason is SnapshotReason.REQUESTED:
            return True
        if any(holder.forked_from == one.id for holder in tree.holders.values()):
            return True
        line = ancestors(owner.head)
        if one.id not in line:
            return False
        newer = [
            other
            for key in line[: line.index(one.id)]
            if (other := tree.entries[key]).workspace_id == owner.id
            and not (other.is_named or other.is_going or other.reason is SnapshotReason.REQUESTED)
        ]
        asleep = tree.entries[line[0]].reason is SnapshotReason.HIBERNATE
        return len(newer) < (owner.keep if owner.keep is not None else 0 if asleep else default)

    return {one.id for one in tree.entries.values() if not one.is_going and stays(one)}


@given(trees(), st.integers(1, 4))
@settings(max_examples=400, deadline=None)
def test_nothing_reachable_goes_and_nothing_unreachable_stays(tree: Tree, default: int) -> None:
    going = expendable(tree, default)
    whole = {entry.id for entry in tree.entries.values() if not entry.is_going}
    must_stay = reachable(tree, default)
    assert not going & must_stay
    assert whole - must_stay <= going
    assert going <= whole, "what is marked already is not chosen again"


@given(trees(), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_applying_it_once_is_enough_and_keeps_the_way_connected(tree: Tree, default: int) -> None:
    going = expendable(tree, default)
    marked = {
        key: Entry(one.id, one.workspace_id, one.parent_id, one.reason, one.is_named, is_going=one.is_going or key in going)
        for key, one in tree.entries.items()
    }
    after = Tree(marked, tree.holders, tree.references)
    assert expendable(after, default) == frozenset()
    for holder in tree.holders.values():
        before = [one.id for one in way(tree, holder.head) if one.id not in going]
        assert [one.id for one in way(after, holder.head)] == before
    # The rows of those that are gone are dropped and their children hang on what is left: the same tree, the same verdict.
    kept = {
        key: Entry(one.id, one.workspace_id, nearest(after, key), one.reason, one.is_named)
        for key, one in marked.items()
        if not one.is_going
    }
    dropped = Tree(kept, tree.holders, tree.references)
    assert why_kept(dropped, default) == why_kept(after, default)


@given(trees())
@settings(max_examples=150, deadline=None)
def test_a_removal_is_refused_exactly_where_something_would_break(tree: Tree) -> None:
    used = {holder.head for holder in tree.holders.values()} | {holder.forked_from for holder in tree.holders.values()}
    for key in tree.entries:
        assert (irremovable(tree, key) is not None) == (key in used or key in tree.references)


def line(*reasons: SnapshotReason, keep: int | None = None, head: int | None = None) -> Tree:
    """One workspace whose snapshots follow each other."""
    owner = WorkspaceId("ws_a")
    entries = [Entry(SnapshotId(f"snp_{n}"), owner, snp(n - 1) if n else None, reason) for n, reason in enumerate(reasons)]
    holder = Holder(owner, "a", snp(len(reasons) - 1 if head is None else head), None, keep)
    return Tree({entry.id: entry for entry in entries}, {owner: holder})


AUTO, SLEPT, ASKED = SnapshotReason.AUTOMATIC, SnapshotReason.HIBERNATE, SnapshotReason.REQUESTED


@pytest.mark.parametrize(
    ("tree", "goes"),
    [
        (line(AUTO, AUTO, AUTO), {0}),
        (line(SLEPT, AUTO), set()),
        (line(AUTO, AUTO, SLEPT), {0, 1}),
        (line(AUTO, AUTO, SLEPT, keep=2), {0}),
        (line(SLEPT, SLEPT, SLEPT, keep=5), set()),
        (line(AUTO, ASKED, AUTO, AUTO), {0}),
        (line(AUTO, AUTO, keep=0), {0}),
        (line(ASKED, AUTO, AUTO, AUTO, head=1), {2, 3}),
    ],
    ids=["newest two", "a sleep counts", "asleep none", "asleep too if wished", "wish above count", "asked", "none", "beside"],
)
def test_what_people_expect(tree: Tree, goes: set[int]) -> None:
    assert expendable(tree, 2) == {snp(number) for number in goes}


def test_the_reasons_are_told() -> None:
    tree = line(AUTO, ASKED, AUTO)
    tree = Tree(tree.entries, {**tree.holders, WorkspaceId("ws_b"): Holder(WorkspaceId("ws_b"), "b", None, snp(0))})
    assert why_kept(tree, 2) == {
        snp(0): {Kept.ORIGIN, Kept.RECENT},
        snp(1): {Kept.REQUESTED},
        snp(2): {Kept.HEAD, Kept.RECENT},
    }
    assert irremovable(tree, SnapshotId("snp_0")) == "'b' was forked from it"
    assert irremovable(tree, SnapshotId("snp_1")) is None
    assert irremovable(tree, SnapshotId("snp_2")) == "'a' wakes from it"
    four = {WorkspaceId(f"ws_{n}"): Holder(WorkspaceId(f"ws_{n}"), f"w{n}", snp(0), None) for n in range(5)}
    assert irremovable(Tree(tree.entries, four), SnapshotId("snp_0")) == "'w0', 'w1', 'w2' and 2 more wake from it"
    used = Tree(tree.entries, {}, {SnapshotId("snp_0"): ("execution exe_1",)})
    assert irremovable(used, SnapshotId("snp_0")) == "'execution exe_1' needs it"
