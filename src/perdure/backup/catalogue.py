"""Rows made of what an object store says: pure. Manifests in, workspaces and snapshots out.

What the database knew travels in the facts of each snapshot (``workspaces.facts``), as of its upload; of a workspace the newest
facts count. A snapshot that was uploaded without them still says whose it is, of which workspace, after which parent and in which
generation; its workspace gets a name of ours. The head is the last snapshot of the last generation: what a workspace was rewound
to is not there.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from perdure.core.ids import NAME, SnapshotId, WorkspaceId, is_id
from perdure.snapshots.manifest import Manifest

_KINDS = ("workspace", "branch", "lost")
_REASONS = ("requested", "automatic", "hibernate", "fork", "salvaged")
_HEX32 = re.compile(r"^[0-9a-f]{32}$")


@dataclass(frozen=True, slots=True)
class Found:
    """A snapshot in the store. ``facts`` are what its catalogue knew, empty where it was uploaded without."""

    manifest: Manifest
    facts: Mapping[str, Any]

    @property
    def workspace_id(self) -> WorkspaceId:
        """Whose history it is part of: promotion hands snapshots over, so the row knows better than the manifest."""
        told = str(self._snapshot.get("workspace_id", ""))
        return WorkspaceId(told) if is_id(told, "ws") else self.manifest.workspace_id

    @property
    def _snapshot(self) -> Mapping[str, Any]:
        told = self.facts.get("snapshot")
        return told if isinstance(told, Mapping) else {}

    @property
    def workspace(self) -> Mapping[str, Any]:
        told = self.facts.get("workspace")
        return told if isinstance(told, Mapping) else {}

    @property
    def at(self) -> str:
        """When the facts were noted; ISO times of one database sort as text."""
        return str(self.facts.get("at", ""))

    def row(self, known: frozenset[SnapshotId], taken: set[str]) -> dict[str, Any]:
        """Parameters of ``catalogue.add_snapshot`` but the node. A parent that is not here is none; a name is given once."""
        manifest, told = self.manifest, self._snapshot
        plain = manifest.facts()
        names = (
            *("has_memory", "quiesced", "pages", "memory_bytes", "memory_total_bytes", "disk_bytes", "disk_total_bytes"),
            *("device_bytes", "pause_s", "fingerprint", "generation", "image", "disk_gib", "tenant_id", "created_at"),
        )
        parent = told.get("parent_id", manifest.parent_id)
        name, reason = told.get("name"), told.get("reason")
        name = name if isinstance(name, str) and name and name not in taken else None
        if name is not None:
            taken.add(name)
        origin = str(told.get("origin_id", ""))
        return {key: getattr(plain, key) for key in names} | {
            "id": manifest.snapshot_id,
            "workspace_id": self.workspace_id,
            "origin_id": origin if is_id(origin, "ws") else manifest.workspace_id,
            "parent_id": parent if parent in known else None,
            "name": name,
            "reason": reason if reason in _REASONS else "requested",  # nobody knows, so nobody takes it away
            "memory_mib": manifest.size.memory_mib,
            "vcpus": manifest.size.vcpus,
        }


@dataclass(slots=True)
class Catalogue:
    """Parameters of the rows to make, but the node. ``parents``: of workspaces, where both are here. ``nameless``: names that are
    ours."""

    workspaces: list[dict[str, Any]] = field(default_factory=list)
    snapshots: list[dict[str, Any]] = field(default_factory=list)
    parents: dict[WorkspaceId, WorkspaceId] = field(default_factory=dict)
    nameless: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a workspace gets of which nothing else is known."""

    idle_timeout_s: float
    checkpoint_interval_s: float


def catalogue(found: Iterable[Found], defaults: Defaults) -> Catalogue:
    """Everything that can be said of these snapshots, of all tenants together."""
    by_workspace: defaultdict[WorkspaceId, list[Found]] = defaultdict(list)
    for one in found:
        by_workspace[one.workspace_id].append(one)
    made = Catalogue()
    known = frozenset(one.manifest.snapshot_id for some in by_workspace.values() for one in some)
    taken: defaultdict[str, set[str]] = defaultdict(set)  # names of each tenant
    newest_first = sorted(by_workspace.items(), key=lambda entry: max(one.manifest.created_at for one in entry[1]), reverse=True)
    for workspace_id, unordered in newest_first:
        some = _in_order(unordered)
        row = _workspace(workspace_id, some, defaults, taken[some[-1].manifest.tenant_id])
        if row.pop("is_ours"):
            made.nameless.append(row["name"])
        parent = row.pop("parent_id")
        if parent in by_workspace:
            made.parents[workspace_id] = WorkspaceId(parent)
        made.workspaces.append(row)
        names: set[str] = set()
        made.snapshots += reversed([one.row(known, names) for one in reversed(some)])
    return made


def _in_order(some: list[Found]) -> list[Found]:
    """The oldest first: by generation, then children behind their parents. A clock may have been set back between two, so when
    one was made decides only where nothing else does."""
    manifests = {one.manifest.snapshot_id: one.manifest for one in some}

    def ancestors(manifest: Manifest) -> int:
        seen: set[SnapshotId] = set()
        parent = manifest.parent_id
        while parent in manifests and parent not in seen:
            seen.add(parent)
            parent = manifests[parent].parent_id
        return len(seen)

    def place(one: Found) -> tuple[int, int, datetime, SnapshotId]:
        manifest = one.manifest
        return manifest.generation, ancestors(manifest), manifest.created_at, manifest.snapshot_id

    return sorted(some, key=place)


def _workspace(workspace_id: WorkspaceId, some: list[Found], defaults: Defaults, taken: set[str]) -> dict[str, Any]:
    """Of one workspace with its snapshots, oldest first. Of facts that cannot be, what the manifest says is taken."""
    head = some[-1].manifest
    told = max(some, key=lambda one: (_number(one.workspace.get("generation")), one.at, one.manifest.created_at)).workspace
    wanted = told.get("name")
    name, is_ours = _free(wanted if isinstance(wanted, str) and NAME.match(wanted) else None, workspace_id, taken)
    size = (told.get("memory_mib"), told.get("vcpus"))
    days, action = _long_sleep(told)
    whole = all(isinstance(one, int) and one > 0 for one in size)
    machine_id = str(told.get("machine_id", ""))
    return {
        "id": workspace_id,
        "tenant_id": head.tenant_id,
        "name": name,
        "is_ours": is_ours,
        "kind": told.get("kind") if told.get("kind") in _KINDS else "workspace",
        "generation": max(_number(told.get("generation")), *(one.manifest.generation for one in some)),
        "image": head.image,
        "image_name": str(told.get("image_name") or head.image[:12]),
        "memory_mib": size[0] if whole else head.size.memory_mib,
        "vcpus": size[1] if whole else head.size.vcpus,
        "disk_gib": max(_number(told.get("disk_gib")), head.disk_gib),
        "head_snapshot_id": head.snapshot_id,
        "parent_id": told.get("parent_id"),
        "forked_from": told.get("forked_from"),
        "hostname": str(told.get("hostname") or name.partition("@")[0]),
        "machine_id": machine_id if _HEX32.match(machine_id) else hashlib.sha256(workspace_id.encode()).hexdigest()[:32],
        "idle_timeout_s": _seconds(told.get("idle_timeout_s"), defaults.idle_timeout_s),
        "checkpoint_interval_s": _seconds(told.get("checkpoint_interval_s"), defaults.checkpoint_interval_s),
        "keep_snapshots": told.get("keep_snapshots") if isinstance(told.get("keep_snapshots"), int) else None,
        "asleep_after_days": days,
        "asleep_action": action,
        "egress_allow": [str(one) for one in told.get("egress_allow") or ()],
        "environment": _texts(told.get("environment")),
        "metadata": _texts(told.get("metadata")),
        "created_at": _moment(told.get("created_at")) or some[0].manifest.created_at,
        "expires_at": _moment(told.get("expires_at")),
        "wake_at": _moment(told.get("wake_at")),
    }


def _free(wanted: str | None, workspace_id: WorkspaceId, taken: set[str]) -> tuple[str, bool]:
    """A name that no newer workspace of the tenant has: a name is free again when its workspace is deleted, so two may have had
    it. And whether it is one of ours."""
    ours = wanted is None or wanted in taken
    base = (wanted or "recovered").partition("@")[0]
    name = f"{base}@recovered-{re.sub('[^a-z0-9]', '', workspace_id)[-12:]}" if ours else wanted
    assert name is not None, "one of ours, or the one that was wanted"
    taken.add(name)
    return name, ours


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _seconds(value: object, default: float) -> float:
    return float(value) if isinstance(value, int | float) and value >= 0 else default


def _long_sleep(told: Mapping[str, Any]) -> tuple[float | None, str]:
    """What becomes of it after a long sleep: kept, where nobody has said otherwise beyond doubt."""
    days, action = told.get("asleep_after_days"), told.get("asleep_action")
    is_said = action in {"archive", "delete"} and isinstance(days, int | float) and days >= 1
    return (float(days), str(action)) if is_said and days is not None else (None, "keep")


def _texts(value: object) -> dict[str, str]:
    return {str(key): str(text) for key, text in value.items()} if isinstance(value, Mapping) else {}


def _moment(value: object) -> datetime | None:
    try:
        return datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
