"""Webhooks over real PostgreSQL, to a real receiver that fails, hangs and comes back, and with a server that is killed."""

from __future__ import annotations

import asyncio
import base64
import random
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perdure.core import keys
from perdure.core.errors import Conflict, InvalidRequest, NotFound, Unavailable
from perdure.core.ids import DEFAULT_TENANT, TenantId
from perdure.db.database import Database
from perdure.gateway.egress import EgressRefused
from perdure.journal.entries import Journal
from perdure.journal.feed import Wanted
from perdure.webhooks import delivery, messages, service
from perdure.webhooks.delivery import Deliverer
from perdure.webhooks.model import DeliveryState, Webhook, WebhookState
from perdure.webhooks.service import WebhookParts, WebhookService
from tests.fakes import receiver as fake
from tests.fakes.database import fresh_database
from tests.fakes.receiver import Receiver, receiver
from tests.integration.events.stage import ROOT, append, parts

ROOT_OF_REPOSITORY = Path(__file__).parents[3]
OTHER = TenantId("ten_other")


@dataclass
class Stage:
    database: Database
    to: Receiver
    parts: WebhookParts
    service: WebhookService
    deliverer: Deliverer

    async def create(self, *kinds: str, tenant: TenantId = DEFAULT_TENANT) -> Webhook:
        return (await self.service.create(tenant, self.to.url, kinds, "key:k"))[0]

    async def happen(self, *kinds: str, **options: Any) -> None:
        """Entries, numbered and put before the webhooks."""
        await append(self.database.url, *kinds, **options)
        await self.parts.feed.number()

    async def deliver(self, *, later_s: float = 0) -> None:
        """All that is due, so much later."""
        self.database.shift_clock(later_s)
        await self.deliverer.deliver_due()

    async def one(self) -> Webhook:
        (found,) = await self.service.of(DEFAULT_TENANT)
        return found


@pytest.fixture
async def to() -> AsyncIterator[Receiver]:
    async with receiver() as made:
        yield made


@pytest.fixture
async def stage(to: Receiver) -> AsyncIterator[Stage]:
    async with fresh_database() as database:
        made = parts(database, to.port, deadline_s=5)
        deliverer = Deliverer(made, random.Random(1))
        yield Stage(database, to, made, WebhookService(made), deliverer)
        await deliverer.close()


async def test_events_arrive_in_order_signed_and_once(stage: Stage) -> None:
    await stage.happen("before")
    made, secret = await stage.service.create(DEFAULT_TENANT, stage.to.url, (), "key:k")
    await stage.happen("waking", "running", body='{"to":"running"}')
    await stage.deliver()
    await stage.deliver(later_s=86400)
    assert [one.event["type"] for one in stage.to.received] == ["waking", "running"], "nothing of the time before it"
    one = stage.to.received[1]
    key = base64.b64decode(secret.removeprefix("whsec_"))
    assert key == keys.derive(ROOT, made.id)
    assert one.headers["webhook-signature"] == messages.signature(key, one.id, int(one.headers["webhook-timestamp"]), one.body)
    assert one.event["data"]["seq"] == 3
    assert one.event["data"]["body"] == {"to": "running"}
    state = await stage.one()
    assert (state.delivered, state.pending, state.failed, state.last_error) == (2, 0, 0, "")


async def test_a_webhook_gets_what_it_wants_of_its_own_tenant(stage: Stage) -> None:
    await stage.create("hibernated", "failed")
    await stage.create(tenant=OTHER)
    await stage.happen("waking", "hibernated", "failed")
    await stage.happen("theirs", tenant="ten_third")
    await stage.deliver()
    assert [one.event["type"] for one in stage.to.received] == ["hibernated", "failed"]


async def test_a_receiver_that_fails_gets_it_again_with_the_same_id(stage: Stage) -> None:
    await stage.create()
    stage.to.answers.extend([fake.FAILS, fake.GARBAGE, fake.NOTHING, fake.MOVED])
    await stage.happen("waking")
    await stage.deliver()
    assert (await stage.one()).last_error == "The receiver answered with HTTP status 500."
    await stage.deliver()
    assert len(stage.to.received) == 1, "not before its time"
    for wait_s in (6, 12, 24, 48):
        await stage.deliver(later_s=wait_s)
    assert len(stage.to.received) == 5
    assert len({one.id for one in stage.to.received}) == 1
    state = await stage.one()
    assert (state.state, state.delivered, state.pending, state.last_error) == (WebhookState.ACTIVE, 1, 0, "")
    assert state.failed_at is not None


async def test_one_event_that_is_not_taken_does_not_hold_up_the_others(stage: Stage) -> None:
    await stage.create()
    stage.to.answers.append(fake.FAILS)
    await stage.happen("poison", "waking", "running")
    await stage.deliver()
    assert [one.event["type"] for one in stage.to.received] == ["poison", "waking", "running"]
    state = await stage.one()
    assert (state.delivered, state.pending) == (2, 1)


async def test_after_a_day_it_is_given_up_and_told_once(stage: Stage) -> None:
    made = await stage.create()
    stage.to.answers.extend([fake.FAILS] * 100)
    await stage.happen("waking", "running")
    for _ in range(30):
        await stage.deliver(later_s=3600)
    state = await stage.one()
    assert (state.state, state.pending, state.failed) == (WebhookState.FAILING, 0, 2)
    attempts = len(stage.to.received)
    assert 20 <= attempts <= 40
    await stage.deliver(later_s=7 * 86400)
    assert len(stage.to.received) == attempts, "nobody tries any more"
    feed = stage.parts.feed
    found = [one async for one in feed.read(await feed.begin(Wanted(DEFAULT_TENANT, after=0, follow=False)))]
    (told,) = [one for one in found if one.kind == "webhook-failed"]
    assert (told.workspace_id, told.body["webhook_id"]) == (None, made.id)
    assert told.body["event_seq"] in {1, 2}, "whichever is given up first"
    assert (await Journal(stage.database).verify())[1] == [], "the tenant's own thread holds"
    stage.to.answers.clear()
    await stage.happen("hibernating")
    await stage.deliver()
    state = await stage.one()
    assert (state.state, state.delivered, state.failed, state.last_error) == (WebhookState.ACTIVE, 1, 2, "")


async def test_a_receiver_that_hangs_or_is_slow_holds_up_nobody_else(stage: Stage) -> None:
    async with receiver() as other:
        first, second = (parts(stage.database, one.port, deadline_s=60) for one in (stage.to, other))
        await stage.create()
        await WebhookService(second).create(DEFAULT_TENANT, other.url, (), "key:k")
        stage.to.answers.append(fake.HANGS)
        await stage.happen("waking", "running")
        # One deliverer for both receivers: what may be sent to is decided by the first's port, so it gets a sender for each.
        deliverer = Deliverer(_with_both(first, second, other))
        task = asyncio.create_task(deliverer.deliver_due())
        await other.until(2)
        assert len(stage.to.received) == 1, "the second event waits for the first"
        stage.to.release.set()
        await task
        assert stage.to.seqs == [1, 2]
        await deliverer.close()


def _with_both(first: WebhookParts, second: WebhookParts, other: Receiver) -> WebhookParts:
    class Both:
        async def post(self, to: messages.Target, *rest: Any) -> Any:
            return await (second if to.port == other.port else first).sender.post(to, *rest)

    return WebhookParts(first.database, first.clock, first.feed, Both(), first.check, first.root)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------ sent again


async def given_up(stage: Stage, *kinds: str) -> Webhook:
    """A webhook whose receiver has taken none of these for a day."""
    made = await stage.create()
    stage.to.answers.extend([fake.FAILS] * 1000)
    await stage.happen(*kinds)
    for _ in range(30):
        await stage.deliver(later_s=3600)
    assert (await stage.one()).failed == len(kinds)
    stage.to.answers.clear()
    stage.to.received.clear()
    return made


async def test_what_was_given_up_is_sent_again_when_somebody_asks(stage: Stage) -> None:
    made = await given_up(stage, "waking", "running", "hibernated")
    shown = await stage.service.deliveries(DEFAULT_TENANT, made.id, 0, 10)
    assert [(one.seq, one.kind, one.state, one.due_at) for one in shown] == [
        (seq, kind, DeliveryState.FAILED, None) for seq, kind in enumerate(("waking", "running", "hibernated"), 1)
    ]
    assert all(one.attempts >= 10 and one.last_error.endswith("HTTP status 500.") for one in shown)
    assert await stage.service.redeliver(DEFAULT_TENANT, made.id, (2,)) == [2]
    (pending,) = await stage.service.deliveries(DEFAULT_TENANT, made.id, 1, 1)
    assert (pending.seq, pending.state, pending.attempts) == (2, DeliveryState.PENDING, 0)
    await stage.deliver(later_s=3600)
    assert stage.to.seqs == [2]
    assert await stage.service.redeliver(DEFAULT_TENANT, made.id) == [1, 3]
    await stage.deliver(later_s=3600)
    assert stage.to.seqs == [2, 1, 3], "in order, with the events' own numbers"
    assert stage.to.received[0].id == messages.message_id(made.id, 2), "as it was called a day ago"
    state = await stage.one()
    assert (state.state, state.failed, state.last_error) == (WebhookState.ACTIVE, 0, "")
    assert await stage.service.redeliver(DEFAULT_TENANT, made.id) == []


async def test_what_is_sent_again_is_tried_for_another_day(stage: Stage) -> None:
    made = await given_up(stage, "waking")
    stage.to.answers.extend([fake.FAILS] * 2)
    await stage.service.redeliver(DEFAULT_TENANT, made.id, (1,))
    for _ in range(3):
        await stage.deliver(later_s=3600)
    assert stage.to.seqs == [1, 1, 1]
    assert (await stage.one()).failed == 0


async def test_events_that_were_not_given_up_are_told_and_nothing_is_sent(stage: Stage) -> None:
    made = await given_up(stage, "waking", "running")
    await stage.happen("hibernating")
    for seqs in ((1, 3), (1, 99), (2, 1 << 62)):
        with pytest.raises(NotFound, match=f"Event {seqs[1]} was not given up"):
            await stage.service.redeliver(DEFAULT_TENANT, made.id, seqs)
    found = await stage.service.deliveries(DEFAULT_TENANT, made.id, 0, 2)
    assert [one.state for one in found] == [DeliveryState.FAILED] * 2, "one mistake takes back all"


async def test_what_was_given_up_long_ago_goes(stage: Stage) -> None:
    made = await given_up(stage, "waking")
    await stage.happen("running")
    deliverer = Deliverer(stage.parts, keep_days=2)
    await deliverer.prune()
    assert (await stage.one()).failed == 1
    stage.database.shift_clock(3 * 86400)
    await deliverer.prune()
    state = await stage.one()
    assert (state.failed, state.pending) == (0, 1), "what is still to be delivered stays"
    with pytest.raises(NotFound, match="was not given up"):
        await stage.service.redeliver(DEFAULT_TENANT, made.id, (1,))


# --------------------------------------------------------------------------------------------------------- killed servers


async def test_two_servers_deliver_each_event_once(stage: Stage) -> None:
    await stage.create()
    await stage.happen(*map(str, range(20)))
    await asyncio.gather(*(Deliverer(stage.parts).deliver_due() for _ in range(3)))
    assert sorted(stage.to.seqs) == list(range(1, 21))


async def test_what_was_sent_but_not_recorded_is_sent_again_with_the_same_id(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies between the two."""
    await stage.create()
    await stage.happen("waking")
    run = stage.database.run

    async def dies(query: str, /, **parameters: Any) -> int:
        if query == "webhooks.delivered":
            raise Unavailable("The database does not answer.")
        return await run(query, **parameters)

    monkeypatch.setattr(stage.database, "run", dies)
    await stage.deliver()
    monkeypatch.undo()
    await stage.deliver()
    assert len(stage.to.received) == 1, "its lease may still be somebody's"
    await stage.deliver(later_s=delivery.LEASE_S + 1)
    await stage.deliver(later_s=86400)
    first, second = stage.to.received
    assert (first.id, first.body) == (second.id, second.body)
    assert (await stage.one()).delivered == 1


async def test_an_outcome_that_comes_after_its_lease_changes_nothing(stage: Stage) -> None:
    await stage.create()
    await stage.happen("waking")
    stage.to.answers.append(fake.HANGS)
    late = asyncio.create_task(stage.deliverer.deliver_due())
    await stage.to.until(1)
    stage.database.shift_clock(delivery.LEASE_S + 1)
    stage.to.answers.append(fake.FAILS)
    await Deliverer(stage.parts).deliver_due()
    stage.to.release.set()
    await late
    state = await stage.one()
    assert (state.delivered, state.pending) == (0, 1), "the later attempt's outcome stands"


async def test_sigkill_of_the_server_while_the_receiver_answers(stage: Stage) -> None:
    """A real process, killed after the receiver has the event and before it knows that."""
    await stage.create()
    await stage.happen("waking")
    stage.to.answers.append(fake.HANGS)
    command = [sys.executable, "-m", "tests.integration.events.stage", stage.database.url, str(stage.to.port)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT_OF_REPOSITORY)
    try:
        await stage.to.until(1)
    finally:
        process.kill()
        await process.wait()
    await stage.deliver(later_s=delivery.LEASE_S + 1)
    first, second = stage.to.received
    assert (first.id, first.body) == (second.id, second.body)
    assert first.headers["webhook-timestamp"] <= second.headers["webhook-timestamp"]
    assert (await stage.one()).delivered == 1


async def test_the_deliverer_wakes_for_what_happens(stage: Stage) -> None:
    await stage.create()
    await stage.parts.feed.start()
    await stage.deliverer.start()
    await append(stage.database.url, "waking")
    await stage.to.until(1)
    await stage.parts.feed.close()


# --------------------------------------------------------------------------------------------------------------- commands


async def test_tests_are_sent_at_once_and_once(stage: Stage) -> None:
    made = await stage.create("hibernated")
    assert (await stage.service.test(DEFAULT_TENANT, made.id)).is_delivered
    assert stage.to.received[0].event["type"] == "test"
    stage.to.answers.append(fake.FAILS)
    attempt = await stage.service.test(DEFAULT_TENANT, made.id)
    assert (attempt.status, attempt.is_delivered) == (500, False)
    assert len(stage.to.received) == 2


async def test_a_removed_webhook_is_sent_nothing(stage: Stage) -> None:
    made = await stage.create()
    await stage.happen("waking")
    await stage.service.remove(DEFAULT_TENANT, made.id)
    await stage.happen("running")
    await stage.deliver()
    assert stage.to.received == []
    assert await stage.service.of(DEFAULT_TENANT) == []


async def test_what_is_refused(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await stage.create()
    for tenant, name in ((OTHER, made.id), (DEFAULT_TENANT, "whk_nobody"), (DEFAULT_TENANT, "demo")):
        for command in (stage.service.remove, stage.service.test, stage.service.redeliver):
            with pytest.raises(NotFound):
                await command(tenant, name)
        with pytest.raises(NotFound):
            await stage.service.deliveries(tenant, name, 0, 10)
    for url in ("http://127.0.0.1:1/", "http://169.254.169.254/", "https://[::1]/", "http://10.0.0.1/"):
        with pytest.raises(EgressRefused):
            await stage.service.create(DEFAULT_TENANT, url, (), "key:k")
    for url, kinds in (("ftp://example.org", ()), (stage.to.url, ("",)), (stage.to.url, ("x",) * 51)):
        with pytest.raises(InvalidRequest):
            await stage.service.create(DEFAULT_TENANT, url, kinds, "key:k")
    monkeypatch.setattr(service, "WEBHOOKS_MAX", 1)
    with pytest.raises(Conflict):
        await stage.create()
    assert [one.id for one in await stage.service.of(DEFAULT_TENANT)] == [made.id]
