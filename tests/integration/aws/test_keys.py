"""Who may what with a signature: over the real keys and database, and boto3 as it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import botocore.auth
import pytest
from botocore.exceptions import ClientError

from perdure.access.model import LOCAL, OPERATOR, NewKey, Principal
from perdure.access.service import OPERATOR_KEY_ID
from perdure.access.signatures import SKEW_S, Pair
from perdure.api import policy
from perdure.api.aws.routes import routes
from perdure.core.errors import Forbidden
from perdure.core.ids import DEFAULT_TENANT, TenantId
from perdure.core.scopes import KeyScope, granted
from perdure.runs.service.model import FunctionSpec, NewExecution
from tests.fakes.workspaces import KEY
from tests.integration.api.stage import Stage, stage
from tests.integration.aws.conftest import aws

ARN = "arn%3Aaws%3Alambda%3Aus-east-1%3A000000000000%3Afunction%3Amain%3A%24LATEST%2Fdurable-execution%2Fn%2Fexn_none"


@pytest.fixture
async def staged() -> AsyncIterator[Stage]:
    async with stage() as made:
        yield made


def client_of(staged: Stage, pair: Pair, service: str = "lambda") -> Any:
    return aws(str(staged.http.base_url).rstrip("/"), service, key_id=pair.access_key_id, secret=pair.secret_access_key)


async def made(staged: Stage, *scopes: KeyScope, tenant: str | None = None, name: str = "agent") -> Pair:
    key, _ = await staged.access.create_key(OPERATOR, NewKey(name, frozenset(scopes), tenant=tenant))
    return staged.access.pair_of(key)


async def asked(call: Callable[..., Any], **given: Any) -> Any:
    """In a thread: boto3 knows no event loop, and the server needs this one."""
    return await asyncio.to_thread(call, **given)


async def code_of(call: Callable[..., Any], **given: Any) -> tuple[int, str]:
    try:
        answer = await asked(call, **given)
    except ClientError as error:
        return error.response["ResponseMetadata"]["HTTPStatusCode"], error.response["Error"]["Code"]
    return answer["ResponseMetadata"]["HTTPStatusCode"], ""


async def begun(staged: Stage, tenant_id: TenantId = DEFAULT_TENANT) -> str:
    runs = staged.executions
    await runs.register(tenant_id, "w", (FunctionSpec("main", "v1"),))
    return (await runs.begin(NewExecution(tenant_id, "main", name="order"))).arn


async def test_a_pair_opens_what_its_key_opens_and_ends_with_it(staged: Stage) -> None:
    arn = await begun(staged)
    pair = await made(staged, KeyScope.INVOKE)
    client = client_of(staged, pair)
    assert await code_of(client.get_durable_execution, DurableExecutionArn=arn) == (200, "")
    assert await code_of(client.stop_durable_execution, DurableExecutionArn=arn) == (403, "AccessDeniedException")
    await staged.access.revoke(OPERATOR, "agent")
    assert await code_of(client.get_durable_execution, DurableExecutionArn=arn) == (403, "AccessDeniedException")


async def test_an_expired_key_has_no_pair_any_more(staged: Stage) -> None:
    arn = await begun(staged)
    key, _ = await staged.access.create_key(OPERATOR, NewKey("agent", frozenset({KeyScope.READ}), expires_s=0.001))
    client = client_of(staged, staged.access.pair_of(key))
    assert await code_of(client.get_durable_execution, DurableExecutionArn=arn) == (403, "AccessDeniedException")


async def test_the_operators_pair_ends_with_the_key_file(staged: Stage) -> None:
    arn = await begun(staged)
    pair = staged.access.pair(OPERATOR)
    assert pair == staged.access.pair(LOCAL) and pair.access_key_id == OPERATOR_KEY_ID
    assert await code_of(client_of(staged, pair).stop_durable_execution, DurableExecutionArn=arn) == (200, "")
    with pytest.raises(Forbidden):
        staged.access.pair(Principal("visitor", TenantId(""), frozenset()))


@pytest.mark.parametrize("wrong", ["secret", "another", "unknown", "odd"])
async def test_a_wrong_pair_opens_nothing(staged: Stage, wrong: str) -> None:
    arn = await begun(staged)
    pair, other = await made(staged, KeyScope.ADMIN), await made(staged, KeyScope.ADMIN, name="other")
    pairs = {
        "secret": Pair(pair.access_key_id, pair.secret_access_key[:-1] + "x"),
        "another": Pair(pair.access_key_id, other.secret_access_key),
        "unknown": Pair("key_" + "0" * 26, pair.secret_access_key),
        "odd": Pair("AKIDEXAMPLE", pair.secret_access_key),
    }
    code = "InvalidSignatureException" if wrong in {"secret", "another"} else "AccessDeniedException"
    client = client_of(staged, pairs[wrong])
    assert await code_of(client.get_durable_execution, DurableExecutionArn=arn) == (403, code)
    assert await code_of(client.stop_durable_execution, DurableExecutionArn=arn) == (403, code)
    tasks = client_of(staged, pairs[wrong], "stepfunctions")
    assert await code_of(tasks.send_task_heartbeat, taskToken="x") == (400, code)
    rows = [row.act for row in await staged.audit.page(None, None, 0, 100)]
    assert {(act.outcome, act.status) for act in rows} >= {
        ("signature_refused" if wrong in {"secret", "another"} else "unauthenticated", 401)
    }


async def test_a_body_that_was_tampered_with_and_a_wrong_clock(staged: Stage) -> None:
    await begun(staged)
    pair = await made(staged, KeyScope.INVOKE)
    client = client_of(staged, pair)
    given = {"FunctionName": "main", "InvocationType": "Event", "Payload": b'{"n": 1}'}

    def tamper(request: Any, **_: Any) -> None:
        request.body = b'{"n": 2}'

    client.meta.events.register("before-send.lambda", tamper)
    assert await code_of(client.invoke, **given) == (403, "InvalidSignatureException")
    client.meta.events.unregister("before-send.lambda", tamper)
    assert await code_of(client.invoke, **given) == (202, "")


async def test_a_clock_that_is_far_off_opens_nothing(staged: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    await begun(staged)
    client = client_of(staged, await made(staged, KeyScope.READ))
    for off_s, code in (
        (SKEW_S - 60, ""),
        (SKEW_S + 60, "InvalidSignatureException"),
        (-SKEW_S - 60, "InvalidSignatureException"),
    ):
        at = datetime.now(UTC) + timedelta(seconds=off_s)
        monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda at=at: at)
        found = await code_of(client.list_durable_executions_by_function, FunctionName="main")
        assert found == (403 if code else 200, code), off_s


async def test_every_operation_asks_for_its_scope_and_for_a_key(staged: Stage) -> None:
    assert {route.name for route in routes()} == set(policy.AWS)
    secrets = {scope: await staged.key(scope) for scope in KeyScope}
    for route in routes():
        path = route.path.replace("{arn}", ARN).replace("{function}", "nobody").replace("{callback}", "bm90aGluZw%3D%3D")
        headers = {"x-amz-target": "AWSStepFunctions.SendTaskHeartbeat"} if route.path == "/" else {}
        nobody = await staged.http.request(route.method, path, headers=headers)
        assert nobody.status_code == (400 if route.path == "/" else 403), route.name
        for scope, secret in secrets.items():
            bearer = {**headers, "authorization": f"Bearer {secret}"}
            answer = await staged.http.request(route.method, path, headers=bearer)
            is_refused = "AccessDenied" in str(answer.headers.get("x-amzn-errortype")) + answer.text
            assert is_refused is (policy.AWS[route.name].scope not in granted([scope])), (route.name, scope, answer.text)


async def test_another_tenants_execution_is_absent_byte_for_byte(staged: Stage) -> None:
    arn = await begun(staged)
    await staged.tenant("acme")
    stranger = await staged.key("admin", tenant="acme")
    for route in routes():
        if "{arn}" not in route.path:
            continue
        answers = []
        for execution in (arn, arn.rpartition("/")[0] + "/exn_none"):
            path = route.path.replace("{arn}", quote(execution, safe=""))
            body = {"CheckpointToken": "eA=="}
            answer = await staged.ask(
                stranger, route.method, path, params={"CheckpointToken": "eA=="}, content=json.dumps(body).encode()
            )
            text = answer.text.replace(execution.rpartition("/")[2], "ID")
            answers.append((answer.status_code, text, answer.headers["x-amzn-errortype"]))
        assert answers[0] == answers[1], route.name
        assert answers[0][0] == 404, (route.name, answers[0])
    assert (await staged.executions.describe(DEFAULT_TENANT, arn.rpartition("/")[2])).status.value == "RUNNING"


async def test_names_in_host_and_origin_are_judged_here_too(staged: Stage) -> None:
    for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
        bearer = {"authorization": f"Bearer {KEY}", **headers}
        answer = await staged.http.get(f"/2025-12-01/durable-executions/{ARN}", headers=bearer)
        assert (answer.status_code, answer.headers["x-amzn-errortype"]) == (403, "AccessDeniedException")


async def test_a_presigned_url_is_refused(staged: Stage) -> None:
    arn = await begun(staged)
    client = client_of(staged, await made(staged, KeyScope.READ))
    url = client.generate_presigned_url("get_durable_execution", {"DurableExecutionArn": arn})
    answer = await staged.http.get(url)
    assert (answer.status_code, answer.headers["x-amzn-errortype"]) == (403, "InvalidSignatureException")
    assert "presigned" in answer.text


async def test_a_signature_counts_on_awss_paths_only(staged: Stage) -> None:
    pair = await made(staged, KeyScope.ADMIN)
    client = client_of(staged, pair)
    sent: list[Any] = []
    client.meta.events.register("before-send.lambda", lambda request, **_: sent.append(request))
    await code_of(client.get_durable_execution, DurableExecutionArn="x")
    authorization = sent[0].headers["Authorization"].decode()
    answer = await staged.http.get("/v1/keys", headers={"authorization": authorization})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthenticated")


async def test_a_key_that_calls_too_often_is_told_in_awss_words() -> None:
    async with stage(rate_limit_per_s=0.001, rate_limit_burst=1) as staged:
        await begun(staged)
        client = client_of(staged, await made(staged, KeyScope.READ))
        assert await code_of(client.list_durable_executions_by_function, FunctionName="main") == (200, "")
        assert await code_of(client.list_durable_executions_by_function, FunctionName="main") == (429, "TooManyRequestsException")
