"""Packs, manifests, chunks and keys: what goes in comes out, and whatever was changed on the way is refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.core.errors import CorruptData, CorruptSnapshot, InvalidRequest, Shredded
from perdure.machines.driver import PAGE_SIZE
from perdure.snapshots.objects.chunks import (
    BLOCK,
    REGION_PAGES,
    Kind,
    blocks,
    bytes_source,
    file_source,
    read_region,
    regions,
)
from perdure.snapshots.objects.keys import PLAIN, PlainKeyring, ScopeKeys, TenantKeyring
from perdure.snapshots.objects.manifest import ItemManifest, StoredFile, read_manifest
from perdure.snapshots.objects.packs import CHUNK_MAX, FOOT, ChunkReader, PackBuilder, index_bytes, joined, read_index
from perdure.wire.objects import IMAGES, ItemKey, PackId, Scope

TENANT = Scope("ten_a")
SEALED = ScopeKeys(naming=b"n" * 32, sealing=b"s" * 32)
PACK = PackId("pck_00000000000000000000000000")
KEYS = [pytest.param(PLAIN, id="plain"), pytest.param(SEALED, id="sealed")]


def build(contents: list[bytes], keys: ScopeKeys, pack_id: PackId = PACK) -> tuple[bytes, int]:
    builder = PackBuilder(pack_id, TENANT, keys)
    for content in contents:
        builder.add(keys.chunk_id(content), content)
    pack, data, _ = builder.build()
    assert pack.size == len(data)
    return data, pack.index_bytes


@pytest.mark.parametrize("keys", KEYS)
@settings(deadline=None)
@given(contents=st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=8, unique=True))
def test_a_pack_gives_back_what_was_put_in(keys: ScopeKeys, contents: list[bytes]) -> None:
    data, length = build(contents, keys)
    assert index_bytes(PACK, data[-FOOT:]) == length
    index = read_index(PACK, len(data), data[-length:], keys)
    reader = ChunkReader(PACK, keys)
    for content in contents:
        place = index.places[keys.chunk_id(content)]
        assert reader.content(keys.chunk_id(content), place, data[place.offset : place.offset + place.stored]) == content


def unreadable(data: bytes, length: int, keys: ScopeKeys, contents: list[bytes], pack_id: PackId = PACK) -> bool:
    """Whether somebody who reads all chunks of a pack is told that it is damaged; what is not told must be right."""
    try:
        index = read_index(pack_id, len(data), data[-length:], keys)
        reader = ChunkReader(pack_id, keys)
        for content in contents:
            place = index.places[keys.chunk_id(content)]
            assert reader.content(keys.chunk_id(content), place, data[place.offset : place.offset + place.stored]) == content
    except CorruptSnapshot as error:
        assert pack_id in error.message
        return True
    return False


@pytest.mark.parametrize("keys", KEYS)
def test_every_flipped_byte_of_a_pack_is_found_or_harmless(keys: ScopeKeys) -> None:
    contents = [b"a" * 4000, os.urandom(100)]
    data, length = build(contents, keys)
    damaged = (data[:at] + bytes((data[at] ^ 0x10,)) + data[at + 1 :] for at in range(16, len(data)))
    found = sum(unreadable(broken, length, keys, contents) for broken in damaged)
    # zstd ignores nothing that matters but a bit of its own header; what it still decodes to the named content is no damage.
    assert found >= len(data) - 16 - 2


def test_a_sealed_pack_is_bound_to_its_name_and_its_tenant() -> None:
    contents = [b"secret" * 50]
    data, length = build(contents, SEALED)
    assert b"secret" not in data
    other = PackId("pck_00000000000000000000000001")
    assert unreadable(data, length, SEALED, contents, other)
    assert unreadable(data, length, ScopeKeys(SEALED.naming, b"t" * 32), contents)


@pytest.mark.parametrize("keys", KEYS)
def test_a_torn_pack_is_refused(keys: ScopeKeys) -> None:
    data, length = build([b"x" * 500, b"y" * 500], keys)
    for size in (0, 5, FOOT - 1, length - 1, length):
        with pytest.raises(CorruptSnapshot):
            read_index(PACK, len(data) - 1, data[: len(data) - 1][-size or len(data) :], keys)


def test_a_chunk_has_a_size() -> None:
    builder = PackBuilder(PACK, TENANT, PLAIN)
    for content in (b"", bytes(CHUNK_MAX + 1)):
        with pytest.raises(ValueError, match="a chunk holds"):
            builder.add(b"i" * 32, content)


def test_reads_are_joined_when_near_and_kept_apart_when_far_or_large() -> None:
    builder = PackBuilder(PACK, TENANT, PLAIN)
    contents = [os.urandom(1000) for _ in range(10)]
    for content in contents:
        builder.add(PLAIN.chunk_id(content), content)
    places = [builder.build()[2].places[PLAIN.chunk_id(content)] for content in contents]
    wanted = [places[number] for number in (9, 0, 1, 3, 8)]
    assert [[place.number for place in group] for group in joined(wanted, gap=1000, limit=1 << 20)] == [[0, 1, 3], [8, 9]]
    assert [[place.number for place in group] for group in joined(wanted, gap=1000, limit=2000)] == [[0, 1], [3], [8, 9]]


# ------------------------------------------------------------------------------------------------------------------- manifests


def manifest(**changes: object) -> ItemManifest:
    numbers = np.array([0, 2], np.uint32)
    files = (StoredFile("disk", Kind.BLOCKS, 3 * BLOCK, numbers, b"1" * 32 + b"2" * 32), bare("empty"))
    facts = {"generation": 3}
    return ItemManifest(ItemKey(TENANT, "snp_1"), 7, files, (ItemKey(IMAGES, "base-1"),), facts, **changes)  # type: ignore[arg-type]


def bare(name: str) -> StoredFile:
    return StoredFile(name, Kind.BLOCKS, 0, np.empty(0, np.uint32), b"")


@pytest.mark.parametrize("keys", KEYS)
def test_a_manifest_comes_back_and_every_flipped_byte_is_found(keys: ScopeKeys) -> None:
    before = manifest()
    data = before.to_bytes(keys)
    after = read_manifest(before.key, 7, data, keys)
    assert (after.key, after.attempt, after.needs, after.facts) == (before.key, 7, before.needs, {"generation": 3})
    assert [file.name for file in after.files] == ["disk", "empty"]
    assert after.file("disk").chunk_ids() == [b"1" * 32, b"2" * 32]
    assert after.file("disk").numbers.tolist() == [0, 2]
    for at in range(len(data)):
        with pytest.raises(CorruptSnapshot, match="ten_a/snp_1"):
            read_manifest(before.key, 7, data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :], keys)
    for size in range(0, len(data), 7):
        with pytest.raises(CorruptSnapshot):
            read_manifest(before.key, 7, data[:size], keys)


@pytest.mark.parametrize("keys", KEYS)
def test_a_manifest_in_another_place_is_refused(keys: ScopeKeys) -> None:
    data = manifest().to_bytes(keys)
    for key, attempt in ((ItemKey(TENANT, "snp_2"), 7), (ItemKey(TENANT, "snp_1"), 8)):
        with pytest.raises(CorruptSnapshot):
            read_manifest(key, attempt, data, keys)


def test_a_manifest_names_each_file_once() -> None:
    with pytest.raises(InvalidRequest, match="two files of one name"):
        ItemManifest(ItemKey(TENANT, "x"), 1, (bare("a"), bare("a"))).to_bytes(PLAIN)


def test_an_unknown_file_is_named() -> None:
    with pytest.raises(CorruptSnapshot, match="no file memory"):
        manifest().file("memory")


@pytest.mark.parametrize(
    ("scope", "name"), [("ten_a", ""), ("ten_a", "../x"), ("ten_a", "a.b"), ("ws_a", "x"), ("", "x"), ("ten_a/b", "x")]
)
def test_names_that_would_lead_elsewhere_are_refused(scope: str, name: str) -> None:
    with pytest.raises(InvalidRequest):
        ItemKey(Scope(scope), name)


# ---------------------------------------------------------------------------------------------------------------------- chunks


def test_holes_and_zeros_of_a_file_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    with path.open("wb") as file:
        file.write(b"a" * BLOCK)
        file.write(bytes(BLOCK))
        file.seek(1000 * BLOCK)
        file.write(b"end")
    assert list(blocks(path)) == [(0, b"a" * BLOCK), (1000, b"end")]
    assert file_source("disk", path).size == 1000 * BLOCK + 3


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptSnapshot, match=r"seg_1\.pages is missing"):
        file_source("x", tmp_path / "seg_1.pages")


@settings(deadline=None)
@given(data=st.binary(max_size=50).map(lambda some: some * 4000))
def test_bytes_are_cut_like_files(data: bytes) -> None:
    source = bytes_source("x", data)
    out = bytearray(source.size)
    for number, content in source.chunks:
        assert any(content)
        out[number * BLOCK : number * BLOCK + len(content)] = content
    assert bytes(out) == data


PAGES = st.sets(st.integers(0, 5 * REGION_PAGES), max_size=40)


@settings(deadline=None)
@given(located=PAGES, zero=PAGES, cuts=st.sets(st.integers(0, 5), max_size=3))
def test_regions_hold_exactly_the_changed_pages(located: set[int], zero: set[int], cuts: set[int]) -> None:
    zeros = np.array(sorted(zero - located), np.uint32)
    pages = np.array(sorted(located), np.uint32)
    content = np.repeat((pages % 251 + 1).astype(np.uint8)[:, None], PAGE_SIZE, axis=1)
    edges = [0, *(int(np.searchsorted(pages, cut * REGION_PAGES)) for cut in sorted(cuts)), len(pages)]
    batches = [(pages[low:high], content[low:high]) for low, high in zip(edges, edges[1:], strict=False)]  # noqa: RUF007
    found: dict[int, int] = {}
    found_zero: list[int] = []
    numbers = []
    for number, data in regions(batches, zeros):
        numbers.append(number)
        back = read_region(number, data, "ram")
        found |= dict(zip(back.pages.tolist(), back.content[:, 0].tolist(), strict=True))
        found_zero += back.zeros.tolist()
    assert numbers == sorted(set(numbers)), "each region once, in order"
    assert found == {page: page % 251 + 1 for page in located}
    assert found_zero == zeros.tolist()


@pytest.mark.parametrize("data", [b"", b"\x01", b"\0\0\0\0", b"\x01\0\x01\0" + bytes(PAGE_SIZE), b"\x01\0\0\0" + bytes(100)])
def test_what_is_no_region_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptSnapshot, match="ram"):
        read_region(3, data, "ram")


# ------------------------------------------------------------------------------------------------------------------------ keys


def test_a_tenants_keys_last_and_differ_from_anothers(tmp_path: Path) -> None:
    keys = TenantKeyring(tmp_path / "keys", b"m" * 32).of(TENANT)
    assert TenantKeyring(tmp_path / "keys", b"m" * 32).of(TENANT) == keys
    other = TenantKeyring(tmp_path / "keys", b"m" * 32).of(Scope("ten_b"))
    assert len({keys.naming, keys.sealing, other.naming, other.sealing, None}) == 5
    assert all((path.stat().st_mode & 0o777) == 0o600 for path in (tmp_path / "keys").iterdir())


def test_the_same_content_has_other_names_with_other_tenants(tmp_path: Path) -> None:
    ring = TenantKeyring(tmp_path, b"m" * 32)
    names = {ring.of(scope).chunk_id(b"content") for scope in (TENANT, Scope("ten_b"), IMAGES)}
    assert len(names) == 3
    assert ring.of(IMAGES) == PLAIN == PlainKeyring().of(TENANT)


def test_a_shredded_key_never_comes_back(tmp_path: Path) -> None:
    ring = TenantKeyring(tmp_path, b"m" * 32)
    ring.of(TENANT)
    before = (tmp_path / "ten_a.key").read_bytes()
    (tmp_path / ".tmp-ten_a.key-17-00ff").write_bytes(before)  # of a process that died
    ring.shred(TENANT)
    ring.shred(TENANT)
    for again in (ring, TenantKeyring(tmp_path, b"m" * 32)):
        with pytest.raises(Shredded, match="ten_a"):
            again.of(TENANT)
    assert before not in b"".join(path.read_bytes() for path in tmp_path.iterdir())
    ring.of(Scope("ten_b"))


def test_a_key_of_another_master_or_tenant_is_refused(tmp_path: Path) -> None:
    TenantKeyring(tmp_path, b"m" * 32).of(TENANT)
    with pytest.raises(CorruptData, match="another master key"):
        TenantKeyring(tmp_path, b"n" * 32).of(TENANT)
    (tmp_path / "ten_b.key").write_bytes((tmp_path / "ten_a.key").read_bytes())
    with pytest.raises(CorruptData, match="ten_b"):
        TenantKeyring(tmp_path, b"m" * 32).of(Scope("ten_b"))
    with pytest.raises(InvalidRequest, match="master key"):
        TenantKeyring(tmp_path, b"short")
    with pytest.raises(InvalidRequest, match="Images"):
        TenantKeyring(tmp_path, b"m" * 32).shred(IMAGES)
