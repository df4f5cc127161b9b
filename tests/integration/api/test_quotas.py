"""Limits and rates over real HTTP: what is refused, how it is told, and what the SDK makes of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure.api.throttle import EXECUTING_FACTOR
from perdure.core.errors import InvalidRequest, MissingScope, NotFound, QuotaExceeded, RateLimited
from perdure.sdk import AsyncClient
from perdure.sdk._core import Call, get
from tests.fakes.workspaces import KEY
from tests.integration.api.stage import Stage, stage


def url(staged: Stage) -> str:
    return str(staged.http.base_url).rstrip("/")


def error_of(response: Any) -> dict[str, Any]:
    found: dict[str, Any] = response.json()["error"]
    return found


async def made(staged: Stage, secret: str, name: str) -> Any:
    return await staged.ask(secret, "POST", "/v1/workspaces", json={"name": name, "memory_mib": 256})


# ----------------------------------------------------------------------------------------------------------------- quotas


async def test_the_operator_sets_limits_and_a_tenant_sees_its_own() -> None:
    async with stage() as staged:
        acme = await staged.tenant("acme")
        theirs = await staged.key("operate", tenant="acme")
        async with AsyncClient(url=url(staged), api_key=KEY) as operator, AsyncClient(url=url(staged), api_key=theirs) as tenant:
            before = await tenant.quota()
            assert (before.tenant_id, before.name) == (acme, "acme")
            assert set(before.limits.model_dump().values()) == {None}
            set_ = await operator.set_quota("acme", workspaces=2, storage_gib=0.5)
            assert set_ == await operator.quota(acme) == await tenant.quota()
            await operator.set_quota(acme, execs=3, storage_gib=None)
            await made(staged, theirs, "demo")
            now = await tenant.quota()
            assert now.limits.model_dump() == {"workspaces": 2, "memory_awake_mib": None, "storage_gib": None, "execs": 3}
            assert now.used.model_dump() == {"workspaces": 1, "memory_awake_mib": 256, "storage_gib": 0.0, "execs": 0}
            assert now.awake == ["demo"]
            assert (await operator.quota()).used.workspaces == 0, "the operator's own tenant is another one"
            for call in (tenant.quota(acme), tenant.set_quota("acme", workspaces=9), tenant.quota("default")):
                with pytest.raises(MissingScope):
                    await call
            with pytest.raises(NotFound, match="There is no tenant 'nobody'"):
                await operator.set_quota("nobody", workspaces=1)
            with pytest.raises(InvalidRequest, match="No limit was given"):
                await operator.set_quota("acme")
            assert (await tenant.quota()).limits == now.limits


NONSENSE: list[Any] = [
    *({"workspaces": -1}, {"workspaces": 1.5}, {"memory_awake_mib": 1 << 70}, {"storage_gib": -0.1}, {"storage_gib": "NaN"}),
    *({"execs": "many"}, {"colour": 1}, []),
]


async def test_nonsense_is_no_limit(subtests: pytest.Subtests) -> None:
    async with stage() as staged:
        for body in NONSENSE:
            with subtests.test(str(body)):
                answer = await staged.ask(KEY, "PATCH", "/v1/tenants/default/quota", json=body)
                assert (answer.status_code, error_of(answer)["code"]) == (422, "invalid_request")
                assert set((await staged.ask(KEY, "GET", "/v1/quota")).json()["limits"].values()) == {None}


async def test_a_refusal_is_typed_through_the_sdk() -> None:
    """(peers: "asks that recur": typed quota errors)"""
    async with stage() as staged, AsyncClient(url=url(staged), api_key=KEY) as client:
        await client.set_quota("default", workspaces=1, memory_awake_mib=256)
        assert (await made(staged, KEY, "demo")).status_code == 201
        refused = await made(staged, KEY, "other")
        assert (refused.status_code, "retry-after" in refused.headers) == (429, False)
        with pytest.raises(QuotaExceeded, match="The tenant has 1 of 1 workspaces") as caught:
            await client.request(Call("POST", "/v1/workspaces", body={"name": "other"}))
        assert caught.value.details == {"quota": "workspaces", "limit": "1", "used": "1", "asked": "1"}
        assert not caught.value.retryable
        await client.set_quota("default", workspaces=None)
        with pytest.raises(QuotaExceeded, match="in use by demo") as caught:
            await client.request(Call("POST", "/v1/workspaces", body={"name": "other", "memory_mib": 256}))
        assert (caught.value.retryable, caught.value.details["awake"]) == (True, "demo")


async def test_commands_beyond_the_limit_are_refused_until_one_has_ended() -> None:
    async with stage() as staged:
        await staged.ask(KEY, "PATCH", "/v1/tenants/default/quota", json={"execs": 2})
        for name in ("a", "b"):
            await made(staged, KEY, name)

        async def start(name: str, exec_id: str) -> Any:
            body = {"shell": "hang", "background": True, "exec_id": exec_id}
            return await staged.ask(KEY, "POST", f"/v1/workspaces/{name}/execs", json=body)

        ids = [f"exe_{number:026d}" for number in range(6)]
        answers = await asyncio.gather(*(start("ab"[number % 2], ids[number]) for number in range(6)))
        assert sorted(answer.status_code for answer in answers) == [201, 201, 429, 429, 429, 429], "of all workspaces together"
        runs = [number for number, answer in enumerate(answers) if answer.status_code == 201]
        refused = error_of(next(answer for answer in answers if answer.status_code == 429))
        assert (refused["code"], refused["retryable"], refused["details"]["quota"]) == ("quota_exceeded", True, "execs")
        again = await start("ab"[runs[0] % 2], ids[runs[0]])
        assert again.status_code == 201, "a start that is repeated starts nothing, so it is not refused"
        assert (await staged.ask(KEY, "GET", "/v1/quota")).json()["used"]["execs"] == 2
        await staged.ask(KEY, "POST", f"/v1/workspaces/{'ab'[runs[0] % 2]}/execs/{ids[runs[0]]}/kill")
        assert (await start("a", "exe_" + "9" * 26)).status_code == 201


async def test_a_file_that_does_not_fit_is_refused_before_it_is_sent() -> None:
    async with stage() as staged:
        await made(staged, KEY, "demo")
        await staged.ask(KEY, "PATCH", "/v1/tenants/default/quota", json={"storage_gib": 0.001})

        async def write(size: int) -> Any:
            path = "/v1/workspaces/demo/files/content"
            return await staged.ask(KEY, "PUT", path, params={"path": "/x"}, content=b"x" * size)

        assert (await write(1000)).status_code == 200
        large = await write(2_000_000)
        assert (large.status_code, error_of(large)["details"]["quota"]) == (429, "storage_gib")
        read = await staged.ask(KEY, "GET", "/v1/workspaces/demo/files/content", params={"path": "/x"})
        assert len(read.content) == 1000
        await staged.ask(KEY, "PATCH", "/v1/tenants/default/quota", json={"storage_gib": 0})
        assert (await write(1)).status_code == 429


# ------------------------------------------------------------------------------------------------------------------ rates


async def test_a_key_that_calls_too_often_is_told_when_it_may_again_and_others_are_not() -> None:
    async with stage(rate_limit_per_s=0.001, rate_limit_burst=3) as staged:
        busy, quiet = await staged.key("read"), await staged.key("read")
        answers = [await staged.ask(busy, "GET", "/v1/health") for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
        error = error_of(answers[-1])
        assert (error["code"], error["retryable"], error["ambiguous"]) == ("rate_limited", True, False)
        assert 900 < float(error["details"]["retry_after_s"]) <= int(answers[-1].headers["retry-after"]) <= 1000
        assert (await staged.ask(quiet, "GET", "/v1/health")).status_code == 200


async def test_what_executions_say_is_counted_apart_and_allows_more() -> None:
    """A function that may not checkpoint cannot go on; and who executes much can look all the while."""
    async with stage(rate_limit_per_s=0.001, rate_limit_burst=1) as staged:
        secret = await staged.key("operate", "invoke", "read")
        says = ("POST", "/v1/workers/none/take")
        statuses = [(await staged.ask(secret, *says)).status_code for _ in range(EXECUTING_FACTOR + 1)]
        assert 429 not in statuses[:-1] and statuses[-1] == 429
        looks = [(await staged.ask(secret, "GET", "/v1/executions")).status_code for _ in range(2)]
        assert looks == [200, 429]


async def test_the_sdk_waits_for_its_turn_within_its_callers_time() -> None:
    async with stage(rate_limit_per_s=20, rate_limit_burst=1) as staged:
        secret = await staged.key("admin")
        async with AsyncClient(url=url(staged), api_key=secret) as client:
            answers = await asyncio.gather(*(client.health() for _ in range(10)))
            assert {answer.status for answer in answers} == {"ok"}
    async with stage(rate_limit_per_s=0.01, rate_limit_burst=1) as staged:
        secret = await staged.key("admin")
        async with AsyncClient(url=url(staged), api_key=secret, timeout_s=5) as client:
            await client.health()
            with pytest.raises(RateLimited, match="more calls than it may"):
                await client.request(get("/v1/health"))


async def test_the_socket_is_not_limited() -> None:
    async with stage(rate_limit_per_s=0.001, rate_limit_burst=1) as staged, AsyncClient(settings=staged.settings) as local:
        for _ in range(5):
            assert (await local.health()).status == "ok"


async def test_wrong_keys_are_limited_by_address_and_right_ones_get_in_all_the_while() -> None:
    async with stage(auth_failures_per_min=0.01) as staged:
        right = await staged.key("read")
        statuses = [(await staged.ask("pdk_wrong", "GET", "/v1/health")).status_code for _ in range(40)]
        assert (statuses[:30], statuses[30:]) == ([401] * 30, [429] * 10)
        assert (await staged.ask(right, "GET", "/v1/health")).status_code == 200
        assert (await staged.ask(KEY, "GET", "/v1/health")).status_code == 200
