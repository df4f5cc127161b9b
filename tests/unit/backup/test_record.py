"""The manifest of a backup: what is read is what was written, or an error that names it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perdure.backup.make import key_mark
from perdure.backup.place import directory_of, open_place, place_url
from perdure.backup.record import BackupRecord, LeftOut, StoredItem, _digest, read_record
from perdure.core.errors import CorruptData, HostUnfit, InvalidRequest, NotFound

ITEM = StoredItem("ten_default", "snp_1", 7, 100, "ab" * 32)
RECORD = BackupRecord(
    id="bak_1",
    created_at=datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
    release="1.2.3",
    schema="0005",
    postgres=18,
    dump=replace(ITEM, name="database-bak_1"),
    images=(replace(ITEM, scope="images", name="img-1"),),
    snapshots=(ITEM,),
    names={"base": "70" * 32},
    workspaces=3,
    sealed=True,
    key_mark="cd" * 16,
    keys={"ten_default.key": "AAAA"},
    master_key=None,
)


def test_a_record_is_read_as_it_was_written() -> None:
    assert read_record(RECORD.to_bytes(), "bak_1") == RECORD
    assert [one.name for one in RECORD.items] == ["img-1", "snp_1", "database-bak_1"]


def test_every_byte_counts() -> None:
    """Whatever is changed is found, unless it says the same."""
    data = RECORD.to_bytes()
    for at in range(0, len(data), 7):
        changed = data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :]
        try:
            assert read_record(changed, "bak_1") == RECORD
        except (CorruptData, HostUnfit) as error:
            assert "bak_1" in error.message


@given(
    name=st.text(st.sampled_from(list("./\\a0-\n\0")), max_size=12),
    digest=st.sampled_from(["70" * 32, "../x"]),
    item=st.text(max_size=6),
)
@example(name="../../../../etc/passwd", digest="70" * 32, item="snp_1")
def test_whoever_wrote_it_its_names_stay_in_the_home(name: str, digest: str, item: str) -> None:
    forged = replace(RECORD, names={name: digest}, keys={name: ""}, snapshots=(replace(ITEM, name=item),))
    with pytest.raises(CorruptData, match="is damaged"):
        read_record(forged.to_bytes(), "bak_1")
    try:
        made = read_record(replace(forged, keys={}).to_bytes(), "bak_1")
    except CorruptData:
        return
    assert all(Path(one).name == one and one not in (".", "..") for one in (*made.names, *made.names.values(), item))


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b'{"checksum": 1}', RECORD.to_bytes()[:-20], b"\xff\xfe"])
def test_what_is_no_record_is_damaged(data: bytes) -> None:
    with pytest.raises(CorruptData, match="The manifest of the backup bak_9 is damaged") as caught:
        read_record(data, "bak_9")
    assert "--backup" in caught.value.hint


def test_a_newer_format_names_the_release_that_reads_it() -> None:
    plain = json.loads(RECORD.to_bytes()) | {"format": 3}
    del plain["checksum"]
    with pytest.raises(HostUnfit, match=r"made by Perdure 1\.2\.3; this release reads formats up to 2"):
        read_record(json.dumps({"checksum": _digest(plain), **plain}).encode(), "bak_1")


def test_only_a_backup_with_something_left_out_has_the_second_format() -> None:
    """An earlier release reads all others."""
    plain = json.loads(RECORD.to_bytes())
    assert plain["format"] == 1 and "left_out" not in plain
    left_out = (LeftOut("snp_2", "demo", "why", has_disk=True, heads=("ws_1", "ws_2")), LeftOut(None, "new", "why"))
    partial = replace(RECORD, left_out=left_out)
    assert json.loads(partial.to_bytes())["format"] == 2
    assert read_record(partial.to_bytes(), "bak_1") == partial


def test_the_mark_of_a_key_tells_keys_apart_and_nothing_else() -> None:
    one, other = bytes(32), bytes([1]) * 32
    assert key_mark(one) == key_mark(one) != key_mark(other)
    assert one.hex()[:16] not in key_mark(one)


def test_a_record_without_the_master_key_does_not_hold_it() -> None:
    assert json.loads(RECORD.to_bytes())["master_key"] is None


def test_places_are_directories_or_urls() -> None:
    assert place_url("/a dir/x") == "file:///a%20dir/x"
    assert str(directory_of("file:///a%20dir/x")) == "/a dir/x"
    assert place_url("s3://bucket/prefix") == "s3://bucket/prefix"
    assert directory_of("s3://bucket/prefix") is None
    for url in ("", "http://x/y", "memory:///"):
        with pytest.raises(InvalidRequest):
            place_url(url)
    with pytest.raises(NotFound, match="There is no directory /nowhere/at-all"):
        open_place("/nowhere/at-all", lambda: 0, make=False)
