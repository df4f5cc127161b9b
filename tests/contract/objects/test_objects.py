"""What is asked of an object store, of the fake and of real ones: memory, a directory, S3, and an S3 that ignores conditions."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.core.errors import CorruptSnapshot, InvalidRequest, NotFound, PerdureError, StaleGeneration, Unavailable
from perdure.snapshots.objects.chunks import bytes_source
from perdure.snapshots.objects.client import ClientSettings, Objects, open_objects
from perdure.snapshots.objects.upload import Contents
from perdure.wire.objects import ItemKey, ItemState
from tests.fakes.catalogue import FakeCatalogue
from tests.fakes.objects import FakeObjects
from tests.fakes.s3 import S3, Request, Trouble, s3_server
from tests.unit.snapshots.objects.stores import TENANT, Home

SEEDS = {number: number for number in range(20)}
KEY = ItemKey(TENANT, "snp_1")
STORES = ["fake", "memory", "file", "s3", "s3 without conditions"]


@pytest.fixture(params=STORES)
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Objects]:
    if request.param == "fake":
        yield FakeObjects()
    elif request.param == "memory":
        yield open_objects("memory:///")
    elif request.param == "file":
        yield open_objects(f"file://{tmp_path}/store%20with%20blanks")
    else:
        with s3_server(ignores_conditions="without" in request.param) as server:
            yield server.objects("/some/prefix")


@pytest.fixture
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


async def names(objects: Objects, prefix: str) -> dict[str, int]:
    return {name: size async for name, size in objects.list(prefix)}


async def test_objects_are_put_read_listed_and_deleted(objects: Objects) -> None:
    data = os.urandom(100_000)
    await objects.put("a/packs/one", data)
    await objects.put("a/packs/two", b"")
    await objects.put("a/packs/one", data)
    await objects.put("ab/packs/three", b"x")
    assert await objects.get("a/packs/one") == data
    assert await objects.get("a/packs/two") == b""
    assert await objects.read("a/packs/one", 0, 100_000) == data
    assert await objects.read("a/packs/one", 99_000, 1000) == data[99_000:]
    assert await objects.read("a/packs/one", 5, 0) == b""
    assert (await objects.size("a/packs/one"), await objects.size("a/packs/none")) == (100_000, None)
    assert await names(objects, "a/packs/") == {"a/packs/one": 100_000, "a/packs/two": 0}
    assert await names(objects, "none/packs/") == {}
    await objects.delete(["a/packs/one", "a/packs/none", "ab/packs/three"])
    assert await names(objects, "a/packs/") == {"a/packs/two": 0}
    assert await objects.size("ab/packs/three") is None


async def test_what_is_not_there_is_told(objects: Objects) -> None:
    await objects.put("x/short", b"123")
    with pytest.raises(NotFound, match="x/none"):
        await objects.get("x/none")
    with pytest.raises(NotFound, match="x/none"):
        await objects.read("x/none", 0, 3)
    for start, length in ((0, 4), (2, 5), (3, 1), (100, 10)):
        with pytest.raises(NotFound):
            await objects.read("x/short", start, length)


@pytest.mark.long_on("s3 without conditions")
async def test_many_objects_are_all_listed(objects: Objects) -> None:
    for at in range(0, 1020, 60):
        await asyncio.gather(*(objects.put(f"many/{number:05d}", b"x") for number in range(at, at + 60)))
    assert sorted(await names(objects, "many/")) == [f"many/{number:05d}" for number in range(1020)], "more than a page"


async def test_the_whole_library_on_it(objects: Objects) -> None:
    home = Home(objects, FakeCatalogue())
    await home.remote.claim("here")
    item, _ = await home.upload("snp_1", SEEDS)
    _, moved = await home.upload("snp_2", {**SEEDS, 4: 400})
    assert (item.state, moved.reused) == (ItemState.DURABLE, 19)
    assert await Home(objects, home.catalogue).downloader.verify(KEY) == []
    found = await Home(objects, FakeCatalogue()).downloader.survey(TENANT)
    assert [one.manifest.key.name for one in found.items] == ["snp_1", "snp_2"]
    await home.catalogue.release(KEY)
    await home.collect()
    await home.collector.rewrite(TENANT)
    await home.collect(passes=3)
    assert await home.has("snp_2", {**SEEDS, 4: 400})
    await home.catalogue.release(ItemKey(TENANT, "snp_2"))
    await home.collect(passes=2)
    assert await names(objects, f"{TENANT}/") == {}


async def test_two_uploads_at_once_end_in_one_whole_item(objects: Objects) -> None:
    catalogue = FakeCatalogue()
    homes = [Home(objects, catalogue, clock=itertools.count(1000 * number + 1).__next__) for number in range(3)]
    results = await asyncio.gather(*(home.upload("snp_1", SEEDS) for home in homes), return_exceptions=True)
    assert [result for result in results if not isinstance(result, BaseException)]
    assert all(isinstance(result, StaleGeneration) for result in results if isinstance(result, BaseException))
    assert await Home(objects, catalogue).has("snp_1", SEEDS)


# -------------------------------------------------------------------------------------------------------------------------- S3


async def test_no_condition_is_ever_sent(s3: S3) -> None:
    await test_the_whole_library_on_it(s3.objects())
    assert len(s3.requests) > 50
    assert [request for request in s3.requests if request.conditions] == []


async def test_a_big_object_is_one_request(s3: S3) -> None:
    """Parts of an upload that nobody finishes are seen by no listing, and cost money for ever."""
    await s3.objects().put("big", bytes(20 << 20))
    assert [request.method for request in s3.requests if request.method in ("PUT", "POST")] == ["PUT"]


async def test_errors_that_pass_are_not_noticed(s3: S3) -> None:
    counter = itertools.count()
    s3.trouble = lambda request: Trouble.ERROR if next(counter) % 3 == 0 else None
    home = Home(s3.objects(), FakeCatalogue())
    await home.upload("snp_1", SEEDS)
    assert await Home(s3.objects(), home.catalogue).has("snp_1", SEEDS)


QUICK = {"attempt_s": 1.0, "retry_s": 2.0, "retries": 1}


@pytest.mark.parametrize("trouble", [Trouble.ERROR, Trouble.HANG, Trouble.LOST])
async def test_a_store_that_fails_makes_nothing_durable_and_the_next_upload_goes_on(s3: S3, trouble: Trouble) -> None:
    seen: list[Request] = []

    def third_pack(request: Request) -> Trouble | None:
        if request.method == "PUT" and "/packs/" in request.path:
            seen.append(request)
        failing = len({put.path for put in seen}) >= 3
        return trouble if failing and request.method in ("PUT", "HEAD") else None

    s3.trouble = third_pack
    home = Home(s3.objects(**QUICK), FakeCatalogue())
    with pytest.raises(Unavailable) as caught:
        await home.upload("snp_1", SEEDS)
    assert "127.0.0.1" not in str(caught.value.public())
    assert (await home.catalogue.item(KEY)).state is ItemState.UPLOADING
    s3.trouble = lambda request: None
    s3.requests.clear()
    again = Home(s3.objects(), home.catalogue, clock=itertools.count(5000).__next__)
    await again.upload("snp_1", SEEDS)
    sent = {request.path for request in s3.requests if request.method == "PUT"}
    assert not sent & {request.path for request in seen}
    assert await again.has("snp_1", SEEDS)


@pytest.mark.parametrize("trouble", [Trouble.ERROR, Trouble.HANG, Trouble.CUT])
async def test_a_read_that_fails_is_told_and_never_believed(s3: S3, trouble: Trouble) -> None:
    home = Home(s3.objects(**QUICK), FakeCatalogue())
    await home.upload("snp_1", SEEDS)
    s3.trouble = lambda request: trouble if request.method == "GET" and "/packs/" in request.path else None
    reader = Home(s3.objects(**QUICK), home.catalogue)
    with pytest.raises((Unavailable, CorruptSnapshot)):
        await reader.read("snp_1")
    s3.trouble = lambda request: None
    assert await reader.has("snp_1", SEEDS)


async def test_a_bucket_that_is_not_there_is_told(s3: S3) -> None:
    options = {
        "endpoint": f"http://127.0.0.1:{s3.port}",
        "access_key_id": "key",
        "secret_access_key": "secret",
        "region": "us-east-1",
        "client_options": {"allow_http": True},
    }
    elsewhere = open_objects("s3://nobodys-bucket", ClientSettings(options, **QUICK))
    with pytest.raises(PerdureError) as caught:
        await elsewhere.put("x", b"1")
    assert caught.value.hint or isinstance(caught.value, NotFound)


# ------------------------------------------------------------------------------------------------------------------------ URLs


@pytest.mark.parametrize(
    "url",
    [
        "",
        "store",
        "/just/a/path",
        "http://host/x",
        "ftp://x",
        "s3://",
        "gs:///x",
        "file://",
        "file:///",
        "file://host/x",
        "s3://k:p@b",
    ],
)
def test_urls_that_are_no_store_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        open_objects(url)
    assert caught.value.hint
    assert ":p@" not in caught.value.message


def test_a_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidRequest, match="file"):
        open_objects(f"file://{tmp_path}/file/below")


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("gs://bucket/prefix", {"skip_signature": True}),
        ("az://container/prefix", {"account_name": "account", "skip_signature": True}),
        ("s3://bucket", {"region": "eu-central-1", "skip_signature": True}),
    ],
)
def test_every_provider_can_be_set_up(url: str, options: dict[str, object]) -> None:
    assert open_objects(url, ClientSettings(options)).url == url


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot be set up"):
        open_objects("s3://bucket", ClientSettings({"colour": "blue"}))


async def test_files_travel_through_s3(s3: S3, tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    home = Home(s3.objects("/p"), FakeCatalogue(), pack_bytes=1 << 20)
    await home.uploader.upload(Contents(KEY, [bytes_source("disk", data)]))
    await home.downloader.fetch_file(await home.downloader.open(KEY), "disk", tmp_path / "disk")
    assert (tmp_path / "disk").read_bytes() == data
