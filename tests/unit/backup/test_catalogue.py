"""Rows made of what a store says, with and without what the database knew."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from perdure.backup.catalogue import Catalogue, Defaults, Found, catalogue
from perdure.core.ids import NAME, SnapshotId, TenantId, WorkspaceId
from perdure.snapshots.manifest import BaseRef, Manifest
from perdure.wire.node import MachineSize

WHEN = datetime(2026, 1, 1, tzinfo=UTC)
DEFAULTS = Defaults(900.0, 60.0)


def manifest(number: int, workspace: str = "ws_a", parent: str | None = None, **changes: Any) -> Manifest:
    made = Manifest(
        snapshot_id=SnapshotId(f"snp_{number}"),
        workspace_id=WorkspaceId(workspace),
        tenant_id=TenantId("ten_default"),
        generation=number,
        parent_id=SnapshotId(parent) if parent else None,
        image="70" * 32,
        size=MachineSize(512, 1),
        disk_gib=8,
        created_at=WHEN + timedelta(hours=number),
        quiesced=True,
        pause_s=0.02,
        disk_base=BaseRef("70" * 32, "golden.ab"),
        layers=(),
        memory=None,
    )
    return replace(made, **changes)


def facts(workspace: str = "ws_a", at: int = 1, snapshot: dict[str, Any] | None = None, **known: Any) -> dict[str, Any]:
    """As ``workspaces.facts`` notes them at an hour."""
    told = {
        **{"id": workspace, "tenant_id": "ten_default", "name": "demo", "kind": "workspace", "state": "hibernated"},
        **{"generation": 5, "image": "70" * 32, "image_name": "base", "memory_mib": 1024, "vcpus": 2, "disk_gib": 16},
        **{"parent_id": None, "forked_from": None, "hostname": "demo", "machine_id": "0f" * 16, "idle_timeout_s": 60},
        **{"checkpoint_interval_s": 0, "keep_snapshots": 4, "egress_allow": ["example.org:443"], "environment": {"A": "b"}},
        **{"metadata": {"team": "x"}, "created_at": WHEN.isoformat(), "expires_at": None},
    }
    about = {"workspace_id": workspace, "origin_id": workspace, "parent_id": None, "name": None, "reason": "hibernate"}
    moment = (WHEN + timedelta(hours=at)).isoformat()
    return {"workspace": {**told, **known}, "snapshot": {**about, **(snapshot or {})}, "at": moment}


def made(*found: Found) -> Catalogue:
    return catalogue(found, DEFAULTS)


def test_everything_that_the_database_knew_comes_back() -> None:
    got = made(
        Found(manifest(1), facts(snapshot={"name": "good", "reason": "requested"})),
        Found(manifest(2, parent="snp_1"), facts(at=2, snapshot={"parent_id": "snp_1"})),
    )
    (row,) = got.workspaces
    assert (row["name"], row["memory_mib"], row["vcpus"], row["disk_gib"]) == ("demo", 1024, 2, 16)
    assert (row["head_snapshot_id"], row["generation"], row["keep_snapshots"]) == ("snp_2", 5, 4)
    assert (row["egress_allow"], row["environment"], row["metadata"]) == (["example.org:443"], {"A": "b"}, {"team": "x"})
    assert (row["created_at"], row["idle_timeout_s"], row["checkpoint_interval_s"]) == (WHEN, 60.0, 0.0)
    assert [(one["id"], one["parent_id"], one["name"], one["reason"]) for one in got.snapshots] == [
        ("snp_1", None, "good", "requested"),
        ("snp_2", "snp_1", None, "hibernate"),
    ]
    assert got.nameless == []


def test_without_facts_the_manifests_still_say_much() -> None:
    got = made(Found(manifest(3), {}), Found(manifest(4, parent="snp_3"), {}))
    (row,) = got.workspaces
    assert NAME.match(row["name"]) and got.nameless == [row["name"]]
    assert (row["memory_mib"], row["disk_gib"], row["generation"], row["head_snapshot_id"]) == (512, 8, 4, "snp_4")
    assert (row["idle_timeout_s"], row["checkpoint_interval_s"]) == (900.0, 60.0)
    assert len(row["machine_id"]) == 32
    assert [(one["parent_id"], one["reason"]) for one in got.snapshots] == [(None, "requested"), ("snp_3", "requested")]


def test_the_newest_facts_count_whenever_their_snapshot_was_taken() -> None:
    """An old snapshot may be uploaded late, after a rename."""
    got = made(Found(manifest(1), facts(at=9, name="renamed")), Found(manifest(2), facts(at=2, name="before")))
    assert got.workspaces[0]["name"] == "renamed"


def test_of_two_of_one_name_the_newer_keeps_it() -> None:
    got = made(Found(manifest(1), facts()), Found(manifest(2, "ws_b"), facts("ws_b")))
    names = {row["id"]: row["name"] for row in got.workspaces}
    assert names["ws_b"] == "demo"
    assert names["ws_a"].startswith("demo@recovered-") and NAME.match(names["ws_a"])
    assert got.nameless == [names["ws_a"]]


def test_tenants_do_not_share_names() -> None:
    other = manifest(2, "ws_b", tenant_id=TenantId("ten_other"))
    got = made(Found(manifest(1), facts()), Found(other, facts("ws_b")))
    assert [row["name"] for row in got.workspaces] == ["demo", "demo"]


def test_two_snapshots_of_one_name_in_one_workspace() -> None:
    """A name was taken from one and given to another after the first was uploaded."""
    got = made(Found(manifest(1), facts(snapshot={"name": "good"})), Found(manifest(2), facts(snapshot={"name": "good"})))
    assert [one["name"] for one in got.snapshots] == [None, "good"]


def test_parents_that_are_not_there_are_none() -> None:
    got = made(
        Found(manifest(2, parent="snp_1"), facts(parent_id="ws_gone", snapshot={"parent_id": "snp_gone"})),
        Found(manifest(3, "ws_b"), facts("ws_b", name="child", kind="branch", parent_id="ws_a", forked_from="snp_2")),
    )
    assert got.parents == {"ws_b": "ws_a"}
    assert [one["parent_id"] for one in got.snapshots] == [None, None]
    assert {row["kind"] for row in got.workspaces} == {"workspace", "branch"}


def test_a_snapshot_that_promotion_handed_over_belongs_to_its_new_workspace() -> None:
    told = facts(snapshot={"workspace_id": "ws_a", "origin_id": "ws_branch"})
    got = made(Found(manifest(1, "ws_branch"), told))
    assert [row["id"] for row in got.workspaces] == ["ws_a"]
    assert (got.snapshots[0]["workspace_id"], got.snapshots[0]["origin_id"]) == ("ws_a", "ws_branch")


@pytest.mark.parametrize(
    "wrong",
    [
        {"workspace": None, "snapshot": None, "at": None},
        {"workspace": [], "snapshot": "x", "at": 3},
        {"workspace": {"name": "NOT A NAME", "kind": "king", "generation": "x", "memory_mib": -1, "disk_gib": True}},
        {"workspace": {"environment": [], "metadata": 3, "created_at": "yesterday", "idle_timeout_s": -5, "machine_id": "zz"}},
        {"snapshot": {"name": 7, "reason": "because", "parent_id": 3, "origin_id": 4, "workspace_id": "nobody"}},
    ],
)
def test_facts_that_cannot_be_do_no_harm(wrong: dict[str, Any]) -> None:
    got = made(Found(manifest(1), wrong))
    (row,), (snapshot,) = got.workspaces, got.snapshots
    assert NAME.match(row["name"])
    assert (row["kind"], row["generation"], row["memory_mib"], row["disk_gib"]) == ("workspace", 1, 512, 8)
    assert row["idle_timeout_s"] >= 0 and len(row["machine_id"]) == 32 and isinstance(row["environment"], dict)
    assert (snapshot["workspace_id"], snapshot["origin_id"], snapshot["name"]) == ("ws_a", "ws_a", None)
    assert snapshot["reason"] == "requested" and snapshot["parent_id"] is None


def test_what_becomes_of_a_long_sleeper_comes_back_only_if_it_was_said() -> None:
    """In doubt it is kept: nothing is deleted of which nobody said so."""
    cases: list[tuple[dict[str, Any], tuple[float | None, str]]] = [
        ({"asleep_after_days": 30, "asleep_action": "delete"}, (30.0, "delete")),
        ({"asleep_after_days": 1.5, "asleep_action": "archive"}, (1.5, "archive")),
        ({"asleep_after_days": None, "asleep_action": "keep"}, (None, "keep")),
        ({}, (None, "keep")),
        ({"asleep_action": "delete"}, (None, "keep")),
        ({"asleep_after_days": 0, "asleep_action": "delete"}, (None, "keep")),
        ({"asleep_after_days": "30", "asleep_action": "delete"}, (None, "keep")),
        ({"asleep_after_days": 30, "asleep_action": "burn"}, (None, "keep")),
    ]
    for known, expected in cases:
        (row,) = made(Found(manifest(1), facts(**known))).workspaces
        assert (row["asleep_after_days"], row["asleep_action"]) == expected, known


def test_a_time_to_wake_at_comes_back_where_it_is_one() -> None:
    told = WHEN + timedelta(days=3)
    cases: list[tuple[object, datetime | None]] = [(told.isoformat(), told), (None, None), ("tomorrow", None), (7, None)]
    for known, expected in cases:
        (row,) = made(Found(manifest(1), facts(wake_at=known))).workspaces
        assert row["wake_at"] == expected, known
    (row,) = made(Found(manifest(1), facts())).workspaces
    assert row["wake_at"] is None, "facts of an earlier release"


def test_a_clock_that_was_set_back_does_not_make_an_older_state_the_head() -> None:
    back = WHEN - timedelta(days=1)
    got = made(
        Found(manifest(3), facts(at=3, name="then")),
        Found(manifest(5, parent="snp_4", created_at=back), facts(at=-24, name="now", generation=6)),
        Found(manifest(4, parent="snp_3", generation=5), {}),
    )
    (row,) = got.workspaces
    assert (row["head_snapshot_id"], row["name"], row["generation"]) == ("snp_5", "now", 6)
    assert [one["id"] for one in got.snapshots] == ["snp_3", "snp_4", "snp_5"]


def test_parents_that_go_in_a_circle_are_put_in_some_order() -> None:
    got = made(Found(manifest(1, parent="snp_2", generation=1), {}), Found(manifest(2, parent="snp_1", generation=1), {}))
    assert {one["id"] for one in got.snapshots} == {"snp_1", "snp_2"}
