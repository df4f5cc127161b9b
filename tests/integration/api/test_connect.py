"""Workspaces that are found or made in one call, and creates whose answers are lost: over the real service and database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from perdure.core.errors import AlreadyExists, Conflict, InvalidRequest, NotFound
from perdure.sdk import AsyncClient, AsyncWorkspace, SpecConflict
from tests.fakes.bad_wire import BadWire, Loss
from tests.fakes.control_plane import CTX
from tests.fakes.workspaces import KEY
from tests.integration.api.stage import Stage, stage


@pytest.fixture
async def staged() -> AsyncIterator[Stage]:
    async with stage() as made:
        yield made


@pytest.fixture
async def client(staged: Stage) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(url=str(staged.http.base_url), api_key=KEY) as made:
        yield made


async def there_is(staged: Stage) -> list[str]:
    return [one.name for one in await staged.plane.service.find(CTX)]


async def test_it_is_made_once_and_found_after_that(staged: Stage, client: AsyncClient) -> None:
    made = await AsyncWorkspace.connect("demo", create={"memory_mib": 1024, "metadata": {"user": "7"}}, client=client)
    assert (made.info.memory_mib, made.info.metadata, made.report and made.report.memory) == (1024, {"user": "7"}, "new")
    await made.sleep()
    found = await AsyncWorkspace.connect("demo", create={"memory_mib": 1024, "metadata": {"user": "8"}}, client=client)
    assert (found.id, found.info.state, found.info.metadata) == (made.id, "running", {"user": "7"})
    assert found.report is not None and found.report.memory == "kept"
    await made.sleep()
    assert (await AsyncWorkspace.connect("demo", create={}, wake=False, client=client)).info.state == "hibernated"
    assert (await AsyncWorkspace.create("demo", exist_ok=True, client=client)).id == made.id
    assert await there_is(staged) == ["demo"]
    with pytest.raises(NotFound):
        await AsyncWorkspace.connect("other", client=client)
    with pytest.raises(InvalidRequest, match="not a workspace name"):
        await AsyncWorkspace.connect("Other", create={}, client=client)
    with pytest.raises(InvalidRequest, match="no option 'colour'"):
        await AsyncWorkspace.connect("other", create={"colour": "red"}, client=client)  # type: ignore[typeddict-unknown-key]


async def test_many_at_once_get_one_workspace(staged: Stage, client: AsyncClient) -> None:
    """(peers: row 16; asks that recur: idempotent create by name)"""
    found = await asyncio.gather(*(AsyncWorkspace.connect("demo", create={}, client=client) for _ in range(25)))
    assert {one.id for one in found} == {found[0].id}
    assert {(one.info.state, one.info.generation) for one in found} == {("running", 1)}, "nobody woke it once more"
    assert await there_is(staged) == ["demo"]


async def test_found_or_made_while_others_delete_it(staged: Stage, client: AsyncClient) -> None:
    async def churn() -> None:
        for _ in range(10):
            await staged.plane.service.delete(CTX, (await AsyncWorkspace.connect("demo", create={}, client=client)).id)

    await asyncio.gather(churn(), churn(), return_exceptions=True)
    assert (await AsyncWorkspace.connect("demo", create={}, client=client)).info.state == "running"
    assert await there_is(staged) == ["demo"]


@pytest.mark.parametrize(
    ("create", "told"),
    [
        ({"image": "dev"}, {"image": "base, not dev"}),
        ({"template": "dev"}, {"image": "base, not dev"}),
        ({"memory_mib": 2048}, {"memory_mib": "1024, not 2048"}),
        ({"vcpus": 2, "disk_gib": 4000}, {"vcpus": "1, not 2", "disk_gib": "8, not 4000"}),
    ],
)
async def test_another_image_or_size_is_told_and_nothing_is_woken(client: AsyncClient, create: Any, told: dict[str, str]) -> None:
    made = await AsyncWorkspace.create("demo", memory_mib=1024, disk_gib=8, client=client)
    await made.sleep()
    with pytest.raises(SpecConflict, match="a different one") as caught:
        await AsyncWorkspace.connect("demo", create=create, client=client)
    assert (caught.value.details, caught.value.code) == (told, "spec_conflict")
    with pytest.raises(SpecConflict):
        await AsyncWorkspace.create("demo", exist_ok=True, client=client, **create)
    assert (await made.refresh()).state == "hibernated"


async def test_what_is_there_may_be_named_by_its_digest_and_have_a_larger_disk(client: AsyncClient) -> None:
    made = await AsyncWorkspace.create("demo", disk_gib=8, client=client)
    await made.resize(20)
    found = await AsyncWorkspace.connect("demo", create={"image": made.info.image, "disk_gib": 8}, client=client)
    assert found.id == made.id


async def test_a_create_whose_answer_is_lost_makes_one_workspace(staged: Stage) -> None:
    """(peers: asks that recur: idempotent create)"""
    with BadWire(str(staged.http.base_url)) as wire:
        async with AsyncClient(url=wire.url, api_key=KEY) as client:
            wire.losses = [Loss.ANSWER, Loss.REQUEST, Loss.ANSWER]
            made = await AsyncWorkspace.create("demo", client=client)
            assert wire.lost == 3
            assert (made.name, made.info.state, made.info.generation) == ("demo", "running", 1)
            with pytest.raises(AlreadyExists):
                await AsyncWorkspace.create("demo", client=client)
    assert await there_is(staged) == ["demo"]


async def test_a_request_is_known_by_its_key_while_what_it_made_is_there(staged: Stage) -> None:
    async def create(name: str, key: str | None) -> tuple[int, dict[str, Any]]:
        answer = await staged.ask(KEY, "POST", "/v1/workspaces", json={"name": name, "request_key": key})
        return answer.status_code, answer.json()

    status, first = await create("demo", "a" * 8)
    assert status == 201
    await staged.plane.service.sleep(CTX, "demo")
    status, again = await create("demo", "a" * 8)
    assert (status, again["workspace"]["id"], again["workspace"]["state"]) == (201, first["workspace"]["id"], "running")
    for name, key, code in (
        ("demo", "b" * 8, "already_exists"),
        ("demo", None, "already_exists"),
        ("other", "a" * 8, "conflict"),
    ):
        status, refused = await create(name, key)
        assert (status, refused["error"]["code"]) == (409, code)
    await staged.plane.service.delete(CTX, "demo")
    status, anew = await create("demo", "a" * 8)
    assert (status, anew["workspace"]["id"] == first["workspace"]["id"]) == (201, False)
    await staged.tenant("acme")
    stranger = await staged.key("operate", tenant="acme")
    other = await staged.ask(stranger, "POST", "/v1/workspaces", json={"name": "demo", "request_key": "a" * 8})
    assert (other.status_code, other.json()["workspace"]["id"] == anew["workspace"]["id"]) == (201, False)
    assert (await create("short", "x"))[0] == 422


async def test_one_request_sent_twice_at_once_makes_one(staged: Stage) -> None:
    body = {"name": "demo", "request_key": "k" * 32}
    answers = await asyncio.gather(*(staged.ask(KEY, "POST", "/v1/workspaces", json=body) for _ in range(5)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["workspace"]["id"] for answer in answers}) == 1


async def test_a_request_that_failed_can_be_made_again(staged: Stage) -> None:
    staged.plane.node.fail("start", Conflict("The node says no."))
    body = {"name": "demo", "request_key": "k" * 32}
    assert (await staged.ask(KEY, "POST", "/v1/workspaces", json=body)).status_code == 409
    assert (await staged.ask(KEY, "POST", "/v1/workspaces", json=body)).status_code == 201
