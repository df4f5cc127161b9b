"""Which snapshots stay, why, and which go. Pure: the tree, who stands on it, and how much each wants kept.

A snapshot stays as long as one of these holds; no other stays:

    head         a workspace that is not deleted wakes from it
    referenced   an execution, or whatever else has a row in ``snapshot_references``, needs it
    named        its owner, not deleted, gave it a name
    requested    its owner, not deleted, asked for it
    origin       a branch that is not deleted was forked from it, and its owner is not deleted
    recent       of those that nobody asked for, one of the newest N on its owner's way

The *way* of a workspace leads from its head through the parents to the root. What a rewind or a promotion left beside it is not
recent, however young: it stays for what else holds it, or it goes. A snapshot needs none of its ancestors to be woken, so the
way may lose any of them; the next one that stays becomes the parent (``nearest``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from perdure.core.ids import SnapshotId, WorkspaceId
from perdure.workspaces.model import Kept, SnapshotReason


@dataclass(frozen=True, slots=True)
class Entry:
    """A snapshot in the tree. One that ``is_going`` is marked already: it only links those below it with those above."""

    id: SnapshotId
    workspace_id: WorkspaceId
    parent_id: SnapshotId | None
    reason: SnapshotReason
    is_named: bool = False
    is_going: bool = False


@dataclass(frozen=True, slots=True)
class Holder:
    """A workspace that is not deleted. ``keep`` is the N of ``recent``; None follows the server's setting."""

    id: WorkspaceId
    name: str
    head: SnapshotId | None
    forked_from: SnapshotId | None
    keep: int | None = None


@dataclass(frozen=True, slots=True)
class Tree:
    """``references``: who else needs a snapshot, each in a word or two for a person."""

    entries: Mapping[SnapshotId, Entry]
    holders: Mapping[WorkspaceId, Holder]
    references: Mapping[SnapshotId, tuple[str, ...]] = field(default_factory=dict)


def way(tree: Tree, head: SnapshotId | None) -> Iterator[Entry]:
    """From a head to its root, what is going left out. Ends where the tree does not know a parent."""
    seen = set[SnapshotId]()
    while head is not None and head in tree.entries and head not in seen:
        seen.add(head)
        entry = tree.entries[head]
        if not entry.is_going:
            yield entry
        head = entry.parent_id


def nearest(tree: Tree, snapshot_id: SnapshotId) -> SnapshotId | None:
    """The closest ancestor that is there and not going."""
    return next((entry.id for entry in way(tree, tree.entries[snapshot_id].parent_id)), None)


def keeps(tree: Tree, holder: Holder, default: int) -> int:
    """The N of ``recent``. Without a wish of its own a workspace keeps ``default``, and none below a hibernation: such a head is
    whole and newer than all of them, which would only cost bytes for as long as it sleeps."""
    if holder.keep is not None:
        return holder.keep
    head = tree.entries.get(holder.head) if holder.head is not None else None
    return 0 if head is not None and head.reason is SnapshotReason.HIBERNATE else default


def why_kept(tree: Tree, default: int) -> dict[SnapshotId, frozenset[Kept]]:
    """For every snapshot that is not going already; an empty set: it goes."""
    reasons: dict[SnapshotId, set[Kept]] = defaultdict(set)
    for holder in tree.holders.values():
        if holder.head is not None:
            reasons[holder.head].add(Kept.HEAD)
        if holder.forked_from is not None:
            reasons[holder.forked_from].add(Kept.ORIGIN)
        for entry in _recent(tree, holder, default):
            reasons[entry.id].add(Kept.RECENT)
    for snapshot_id, users in tree.references.items():
        if users:
            reasons[snapshot_id].add(Kept.REFERENCED)
    for entry in tree.entries.values():
        reasons[entry.id] |= _asked_for(entry)
        if entry.workspace_id not in tree.holders:
            reasons[entry.id] &= {Kept.HEAD, Kept.REFERENCED}
    return {key: frozenset(reasons[key]) for key, entry in tree.entries.items() if not entry.is_going}


def expendable(tree: Tree, default: int) -> frozenset[SnapshotId]:
    """Those that go."""
    return frozenset(snapshot_id for snapshot_id, reasons in why_kept(tree, default).items() if not reasons)


def irremovable(tree: Tree, snapshot_id: SnapshotId) -> str | None:
    """Why a snapshot may not be removed on request, as the rest of a sentence; None when it may. What retention alone would
    keep (a name, a request, its youth) does not stand against its owner's wish."""
    heads = sorted(holder.name for holder in tree.holders.values() if holder.head == snapshot_id)
    if heads:
        return f"{_few(heads)} {'wakes' if len(heads) == 1 else 'wake'} from it"
    branches = sorted(holder.name for holder in tree.holders.values() if holder.forked_from == snapshot_id)
    if branches:
        return f"{_few(branches)} {'was' if len(branches) == 1 else 'were'} forked from it"
    users = sorted(tree.references.get(snapshot_id, ()))
    return f"{_few(users)} {'needs' if len(users) == 1 else 'need'} it" if users else None


def _asked_for(entry: Entry) -> set[Kept]:
    named = {Kept.NAMED} if entry.is_named else set[Kept]()
    return named | {Kept.REQUESTED} if entry.reason is SnapshotReason.REQUESTED else named


def _recent(tree: Tree, holder: Holder, default: int) -> list[Entry]:
    unasked = (entry for entry in way(tree, holder.head) if entry.workspace_id == holder.id and not _asked_for(entry))
    return [entry for entry, _ in zip(unasked, range(keeps(tree, holder, default)), strict=False)]


def _few(names: list[str]) -> str:
    shown = [repr(name) for name in names[:3]]
    more = len(names) - len(shown)
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]])) if not more else f"{', '.join(shown)} and {more} more"
