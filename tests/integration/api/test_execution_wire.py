"""Executions over a wire that loses things, over servers that are started again, and beside other tenants."""

from __future__ import annotations

import base64
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from perdure.access.model import OPERATOR
from perdure.core.errors import ExecutionEnded
from perdure.core.ids import TenantId
from perdure.runs.protocol import CallbackName
from perdure.sdk import Client, ConnectionLost, ExecutionRunning, ServerUnreachable
from tests.fakes.api_server import FakeServer
from tests.fakes.bad_wire import BadWire, Loss
from tests.fakes.lived_executions import Lives
from tests.fakes.workspaces import KEY
from tests.integration.api.played import Played, worker
from tests.integration.api.stage import ROUTES, Stage, stage
from tests.integration.api.test_keys import BODIES, filled

__all__ = ["worker"]  # the fixture


@pytest.fixture
def wire(server: FakeServer) -> Iterator[BadWire]:
    with BadWire(server.url) as made:
        yield made


@pytest.fixture
def far(wire: BadWire) -> Iterator[Client]:
    with Client(url=wire.url, api_key=KEY) as made:
        yield made


# ------------------------------------------------------------------------------------------------------------------------ wire


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("name", [{}, {"name": "order-1"}])
def test_a_start_whose_answer_is_lost_starts_one(
    far: Client, wire: BadWire, client: Client, loss: Loss, name: dict[str, Any]
) -> None:
    """(peers: row 30)"""
    wire.losses = [loss, loss]
    started = far.executions.start("greet", {"name": "Ada"}, **name)
    assert wire.lost == 2
    assert [one.execution_id for one in client.executions.list()] == [started.id]


@pytest.mark.usefixtures("worker")
def test_an_order_whose_answer_is_lost_is_told_as_ambiguous(far: Client, wire: BadWire) -> None:
    """(peers: row 30)"""
    started = far.executions.start("greet")
    wire.losses = [Loss.ANSWER]
    with pytest.raises(ConnectionLost) as caught:
        started.stop()
    assert (caught.value.retryable, caught.value.ambiguous) == (False, True)
    with pytest.raises(ExecutionEnded):  # it was done, once
        started.stop()


def test_a_callback_whose_answer_is_lost_is_told_as_ambiguous_and_done(far: Client, wire: BadWire, worker: Played) -> None:
    worker.do(lambda lives: lives.ask("review-1"))
    (found,) = far.callbacks.list()
    wire.losses = [Loss.ANSWER]
    with pytest.raises(ConnectionLost) as caught:
        far.callbacks.succeed(found.callback_id, 1)
    assert caught.value.ambiguous
    assert far.callbacks.list() == []


def test_who_waits_waits_on_over_a_server_that_is_started_again(
    server: FakeServer, client: Client, worker: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what ends the execution ends the wait."""
    monkeypatch.setattr("perdure.sdk._core.delay_s", lambda _: 0.05)
    monkeypatch.setattr("perdure.sdk._core.RECONNECTS", 2000)
    started = client.executions.start("greet", {"name": "Ada"})
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(started.result(60)))
    thread.start()
    try:
        server.wait_for(lambda: bool(server.executions._changed._waiters))  # type: ignore[attr-defined]
        server.stop()
    finally:
        server.start()
    worker.do(lambda lives: lives.succeed())
    thread.join(60)
    assert ended == [{"hello": "Ada"}]


@pytest.mark.usefixtures("worker")
def test_a_wait_without_a_server_ends_with_its_time(server: FakeServer, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.sdk._core.delay_s", lambda _: 0.01)
    started = client.executions.start("greet")
    server.stop()
    try:
        with pytest.raises((ServerUnreachable, ExecutionRunning)):
            started.wait(0.2)
    finally:
        server.start()
    assert started.refresh().status.value == "RUNNING"


# --------------------------------------------------------------------------------------------------------------------- tenants


@pytest.fixture
async def staged() -> AsyncIterator[Stage]:
    async with stage() as made:
        yield made


class Theirs:
    """What the first tenant has: one that ended, and one that waits for a callback."""

    def __init__(self, lives: Lives) -> None:
        self.lives = lives
        self.ended = self.asking = self.callback_id = ""

    async def live(self) -> None:
        await self.lives.serve()
        self.ended = await self.lives.succeed("order-1")
        self.asking = await self.lives.ask("review-1")
        (found,) = await self.lives.executions.callbacks(self.lives.tenant_id, self.asking)
        self.callback_id = found.callback_id


async def test_another_tenants_executions_are_absent_by_id_name_and_arn(staged: Stage) -> None:
    acme = TenantId(await staged.tenant("acme"))
    theirs = Theirs(Lives(staged.executions, acme))
    await theirs.live()
    arn = (await staged.executions.describe(acme, theirs.ended)).durable_execution_arn
    owner, stranger = await staged.key("admin", tenant="acme"), await staged.key("admin")
    ours = "/v1/executions/{ref}"
    walked = [name for name, (_, path) in ROUTES.items() if path.startswith(ours) and "{invocation}" not in path]
    assert len(walked) >= 9

    async def told(secret: str, name: str, ref: str) -> tuple[int, str]:
        method, path = ROUTES[name]
        answer = await staged.ask(secret, method, filled(path, ref=ref), **BODIES.get(name, {}))
        return answer.status_code, answer.text.replace(ref, "REF")

    pairs = [
        (theirs.ended, "exn_" + "0" * 26),
        (theirs.asking, "exn_" + "0" * 26),
        ("order-1", "order-2"),
        (arn, arn.replace(theirs.ended, "exn_" + "0" * 26)),
    ]
    for name in walked:
        for real, never in pairs:
            found = await told(stranger, name, real)
            assert found[0] == 404, (name, real, found)
            assert found == await told(stranger, name, never), name
    assert (await staged.ask(stranger, "GET", "/v1/executions")).json() == {"executions": [], "next_cursor": None}
    for name in ("get_execution", "execution_result", "execution_history", "execution_operations"):
        assert (await told(owner, name, arn))[0] == 200
    statuses = [(await staged.executions.describe(acme, one)).status.value for one in (theirs.ended, theirs.asking)]
    assert statuses == ["SUCCEEDED", "RUNNING"], "nobody else has moved them"


async def test_another_tenants_callbacks_are_absent(staged: Stage) -> None:
    acme = TenantId(await staged.tenant("acme"))
    theirs = Theirs(Lives(staged.executions, acme))
    await theirs.live()
    stranger = await staged.key("admin")
    never = str(CallbackName("exn_" + "0" * 26, "c-1", "0" * 16))
    for verb in ("succeed", "fail", "heartbeat"):
        answers = []
        for callback_id in (theirs.callback_id, never):
            quoted = callback_id.replace("/", "%2F").replace("+", "%2B")
            answer = await staged.ask(stranger, "POST", f"/v1/callbacks/{quoted}/{verb}", json={})
            answers.append((answer.status_code, answer.text))
        assert answers[0][0] == 404, verb
        assert answers[0] == answers[1], verb
    assert (await staged.ask(stranger, "GET", "/v1/callbacks")).json() == {"callbacks": []}
    for ref in (theirs.asking, "review-1"):
        listed = await staged.ask(stranger, "GET", "/v1/callbacks", params={"execution": ref})
        assert listed.status_code == 404
    assert len(await staged.executions.callbacks(acme)) == 1


async def test_the_audit_names_the_execution_and_no_payload(staged: Stage) -> None:
    theirs = Theirs(Lives(staged.executions))
    await theirs.live()
    quoted = theirs.callback_id.replace("/", "%2F").replace("+", "%2B")
    asked = {"function": "greet", "input": "hush", "name": "order-9"}
    begun = (await staged.ask(KEY, "POST", "/v1/executions", json=asked)).json()["execution_id"]
    await staged.ask(KEY, "POST", "/v1/executions/order-9/pause", json={"reason": "hush"})
    await staged.ask(KEY, "POST", f"/v1/callbacks/{quoted}/succeed", json={"result": "hush"})
    await staged.ask(KEY, "DELETE", "/v1/executions/order-9")
    found = [row.act for row in await staged.audit.page(None, None, 0, 1000)]
    assert [(act.route, act.target, act.outcome) for act in found] == [
        ("start_execution", begun, "ok"),
        ("pause_execution", begun, "ok"),
        ("succeed_callback", f"{theirs.asking}/c-1", "ok"),
        ("delete_execution", begun, "conflict"),
    ]
    assert "hush" not in repr(found)


@pytest.mark.parametrize(
    "text",
    ["x", "2026-01-01T00:00:00 exn_0", "2026-01-01T00:00:00+00:00 a\0b", "yesterday exn_0", "2026-01-01T00:00:00+00:00", "ä"],
)
async def test_a_cursor_that_was_made_up_is_told(staged: Stage, text: str) -> None:
    for cursor in (text, base64.urlsafe_b64encode(text.encode()).decode()):
        refused = await staged.ask(KEY, "GET", "/v1/executions", params={"cursor": cursor})
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_request"), cursor


async def test_each_entry_of_a_history_says_by_whom_it_is(staged: Stage) -> None:
    """The role, and whose key the call came with; what follows from it is nobody's."""
    lives = Lives(staged.executions)
    await lives.serve()
    starter, steerer = await staged.key("invoke", name="starter"), await staged.key("operate", name="steerer")
    begun = (await staged.ask(starter, "POST", "/v1/executions", json={"function": "greet"})).json()["execution_id"]
    stopped = await staged.ask(steerer, "POST", f"/v1/executions/{begun}/stop", json={})
    assert stopped.status_code == 200
    keys = {one.name: one.id for one in await staged.access.keys(OPERATOR, None)}
    rows = await staged.plane.database.all("runs.links", id=begun, after=0, last=100, limit=100)
    assert [(row["kind"], row["actor"]) for row in rows] == [
        ("started", f"outside key:{keys['starter']}"),
        ("ended", f"operator key:{keys['steerer']}"),
    ]
    found = (await staged.ask(KEY, "POST", "/v1/histories/verify")).text
    assert '"violations":0' in found and '"executions":1' in found, "the actor is in the chain too"
