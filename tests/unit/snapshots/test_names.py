"""No manifest, whoever wrote it, leads to a file outside of the store."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perdure.core.errors import CorruptSnapshot
from perdure.core.ids import BaseId, DiskId, SegmentId, SnapshotId, TenantId, WorkspaceId
from perdure.snapshots.manifest import (
    DEVICES,
    INDEX,
    BaseFact,
    BaseRef,
    DiskFact,
    FileFact,
    Manifest,
    MemoryFacts,
    _sealed,
)
from perdure.snapshots.pageindex import Frames, PageIndex
from perdure.wire.node import MachineSize

ROOT = Path("/store/here")
WHOLE = Manifest(
    snapshot_id=SnapshotId("snp_1"),
    workspace_id=WorkspaceId("ws_1"),
    tenant_id=TenantId("ten_1"),
    generation=1,
    parent_id=SnapshotId("snp_0"),
    image="70" * 32,
    size=MachineSize(512, 1),
    disk_gib=1,
    created_at=datetime(2026, 1, 2, tzinfo=UTC),
    quiesced=True,
    pause_s=0.1,
    disk_base=BaseRef("70" * 32, "512m1c-ab.cd"),
    layers=(DiskFact(DiskId("dsk_1"), 1, 1, "0"),),
    memory=MemoryFacts(
        base=BaseRef("70" * 32, None, BaseFact(BaseId("bas_1"), 1, 1, "0")),
        index=FileFact(INDEX, 1, "0"),
        devices=FileFact(DEVICES, 1, "0"),
        segments={SegmentId("seg_1"): 1},
        pages=1,
        added_bytes=1,
        total_bytes=1,
        fingerprint="fp",
        fingerprint_parts={},
    ),
)
#: Where a manifest has a name, as the way to it.
NAMES = (
    ("snapshot_id",),
    ("workspace_id",),
    ("tenant_id",),
    ("parent_id",),
    ("image",),
    ("disk_base", "image"),
    ("disk_base", "golden"),
    ("layers", 0, "disk_id"),
    ("memory", "base", "image"),
    ("memory", "base", "golden"),
    ("memory", "base", "private", "base_id"),
    ("memory", "index", "name"),
    ("memory", "devices", "name"),
    ("memory", "segments"),
)


def forged(way: tuple[Any, ...], name: str) -> bytes:
    """A manifest with another name at one place, whose checksum holds."""
    plain = json.loads(WHOLE.to_bytes())
    del plain["checksum"]
    at = plain
    for step in way[:-1]:
        at = at[step]
    at[way[-1]] = {name: 1} if way[-1] == "segments" else name
    return _sealed(plain)


def test_what_is_written_is_read() -> None:
    assert Manifest.from_bytes(WHOLE.to_bytes(), "x") == WHOLE
    for way in NAMES:
        assert forged(way, "changed") != WHOLE.to_bytes()


@pytest.mark.parametrize("way", NAMES, ids=lambda way: ".".join(map(str, way)))
@pytest.mark.parametrize("start", ["", "snp_", "dsk_"])
@pytest.mark.parametrize("name", ["../../../../etc/cron.d/x", "/etc/passwd", "a/b", "a\0b", "a\n"])
def test_a_name_that_leads_elsewhere_is_damage(way: tuple[Any, ...], start: str, name: str) -> None:
    with pytest.raises(CorruptSnapshot, match="is no name of"):
        Manifest.from_bytes(forged(way, start + name), "x")


_HOSTILE = st.text(st.sampled_from(list("./\\ab_-0\n\0~*")), max_size=12) | st.text(max_size=8)


@given(
    way=st.sampled_from(NAMES), start=st.sampled_from(["", "snp_", "ws_", "ten_", "dsk_", "seg_", "bas_", "ram."]), name=_HOSTILE
)
@example(way=("memory", "devices", "name"), start="", name="../../../../etc/cron.d/x")
def test_whatever_is_read_lies_in_the_store(way: tuple[Any, ...], start: str, name: str) -> None:
    try:
        made = Manifest.from_bytes(forged(way, start + name), "x")
    except CorruptSnapshot:
        return
    assert made.memory is not None
    bases = (made.disk_base, made.memory.base)
    within = [made.snapshot_id, made.workspace_id, made.tenant_id, made.image, made.memory.index.name, made.memory.devices.name]
    within += [*made.stored_files(), *(ref.image for ref in bases), *(ref.golden for ref in bases if ref.golden is not None)]
    for one in within:
        assert Path(one).name == one and one not in (".", "..") and "\0" not in one, one


def test_an_index_names_segments_and_nothing_else() -> None:
    good = PageIndex(4, frames=Frames((SegmentId("seg_1"),)))
    assert PageIndex.from_bytes(good.to_bytes(), "x").frames.ids == good.frames.ids
    with pytest.raises(CorruptSnapshot, match="name of a segment that none can have"):
        PageIndex.from_bytes(PageIndex(4, frames=Frames((SegmentId("../../x"),))).to_bytes(), "x")
