"""What a life costs: each second once, processor time and bytes once, and what nobody saw is not charged."""

from __future__ import annotations

from datetime import timedelta

import pytest

from perdure.core.errors import InvalidRequest, NotFound
from perdure.fleet.nodes import NodeRegistry
from perdure.journal.entries import Journal
from perdure.metering.usage import Amounts, Metering
from perdure.workspaces.model import WorkspaceState
from tests.fakes.control_plane import CTX, OTHER, ControlPlane
from tests.simulation import meters

NEAR = timedelta(seconds=60)  # what a test itself takes, on any host; what it shifts the clock by is far more


async def used(plane: ControlPlane, ref: str = "demo") -> Amounts:
    (one,) = await Metering(plane.database).of(CTX.tenant_id, ref, None, None)
    return one.amounts


def about(measured: timedelta, seconds: float) -> bool:
    return timedelta(seconds=seconds) <= measured < timedelta(seconds=seconds) + NEAR


async def begin_again(plane: ControlPlane, registry: NodeRegistry, *, down_s: float, node_too: bool = True) -> None:
    await plane.crash(node_too=node_too)
    plane.database.shift_clock(down_s)
    await registry.register(plane.node.node_id)
    await plane.restart()


@pytest.fixture
async def registry(plane: ControlPlane) -> NodeRegistry:
    registry = NodeRegistry(plane.database, lease_s=20)
    await registry.register(plane.node.node_id)
    await plane.restart()
    return registry


async def test_awake_and_asleep_add_up_and_a_deleted_one_stays(plane: ControlPlane) -> None:
    made, _ = await plane.create()
    plane.database.shift_clock(1000)
    await plane.service.sleep(CTX, "demo")
    plane.database.shift_clock(5000)
    await plane.service.wake(CTX, "demo")
    plane.database.shift_clock(300)
    await plane.service.delete(CTX, "demo")
    plane.database.shift_clock(99999)
    amounts = await used(plane)
    assert about(amounts.awake, 1300)
    assert about(amounts.asleep, 5000)
    assert amounts.paused == timedelta()
    assert amounts == await used(plane, made.id), "by its id, and as long as one likes after its end"
    await plane.create()
    both = await Metering(plane.database).of(CTX.tenant_id, "demo", None, None)
    assert [one.state for one in both] == ["deleted", "running"], "two had the name"
    assert await Metering(plane.database).of(OTHER.tenant_id, None, None, None) == []
    with pytest.raises(NotFound, match="There is and was no workspace 'demo'"):
        await Metering(plane.database).of(OTHER.tenant_id, "demo", None, None)
    with pytest.raises(InvalidRequest, match="before the beginning"):
        await Metering(plane.database).of(CTX.tenant_id, None, made.created_at, made.created_at - NEAR)
    await meters.check(plane.database, CTX.tenant_id)


async def test_a_lost_machine_ran_until_it_was_last_known_to(plane: ControlPlane, registry: NodeRegistry) -> None:
    await plane.create(checkpoint_interval_s=0.0)
    plane.database.shift_clock(1000)
    await registry.renew(plane.node.node_id)
    await begin_again(plane, registry, down_s=7200)
    amounts = await used(plane)
    assert about(amounts.awake, 1000)
    assert about(amounts.asleep, 7200)
    assert amounts.losses == 1
    assert (await plane.service.log(CTX, "demo"))[-1].body["alive_until"]
    await plane.service.upkeep.reconcile()
    assert (await used(plane)).losses == 1


async def test_a_server_that_dies_before_it_has_looked_knows_nothing_of_machines(
    plane: ControlPlane, registry: NodeRegistry
) -> None:
    await plane.create(checkpoint_interval_s=0.0)
    plane.database.shift_clock(1000)
    await registry.renew(plane.node.node_id)
    await plane.crash()
    plane.database.shift_clock(3600)
    await registry.register(plane.node.node_id)
    await registry.renew(plane.node.node_id)  # and is gone again
    await begin_again(plane, registry, down_s=3600)
    amounts = await used(plane)
    assert about(amounts.awake, 1000)
    assert about(amounts.asleep, 7200)


async def test_a_checkpoint_is_a_sign_of_life_too(plane: ControlPlane, registry: NodeRegistry) -> None:
    await plane.create(checkpoint_interval_s=0.0)
    plane.database.shift_clock(1000)
    await plane.service.checkpoint(CTX, "demo")
    await begin_again(plane, registry, down_s=7200)
    assert about((await used(plane)).awake, 1000)


async def test_a_machine_that_outlives_the_server_was_awake_all_the_time(plane: ControlPlane, registry: NodeRegistry) -> None:
    await plane.create(checkpoint_interval_s=0.0)
    await begin_again(plane, registry, down_s=7200, node_too=False)
    plane.database.shift_clock(100)
    await plane.service.sleep(CTX, "demo")
    amounts = await used(plane)
    assert about(amounts.awake, 7300)
    assert amounts.losses == 0


async def test_what_comes_back_from_a_backup_slept_since_it_was_made(plane: ControlPlane) -> None:
    made, _ = await plane.create(checkpoint_interval_s=0.0)
    plane.database.shift_clock(1000)
    row = await plane.database.one("clock.now")
    assert row is not None
    body = {"event": "restored", "alive_until": row["now"].isoformat()}
    plane.database.shift_clock(7200)
    async with plane.database.transaction() as tx:
        await Journal(plane.database).append(tx, made.id, "restored", 2, body)
    plane.database.shift_clock(50)
    amounts = await used(plane)
    assert about(amounts.awake, 1000)
    assert about(amounts.asleep, 7250)


async def test_a_machine_that_stands_still_for_want_of_room_is_paused(plane: ControlPlane) -> None:
    made, _ = await plane.create()

    async def fill(*, full: bool) -> None:
        plane.node.fill_disk(made.id, full=full)
        await plane.until("demo", lambda workspace: bool(workspace.state_detail) is full)

    plane.database.shift_clock(100)
    await fill(full=True)
    plane.database.shift_clock(1000)
    await fill(full=False)
    plane.database.shift_clock(200)
    await plane.service.sleep(CTX, "demo")
    amounts = await used(plane)
    assert about(amounts.paused, 1000)
    assert about(amounts.awake, 300)


async def test_processor_time_and_egress_are_counted_once_and_by_machine(plane: ControlPlane) -> None:
    made, _ = await plane.create(checkpoint_interval_s=0.0)

    def read(cpu_s: float, sent: int, received: int) -> None:
        plane.node.machines[made.id].cpu_s = cpu_s
        plane.node.moved[made.id] = (sent, received)

    async def totals() -> tuple[float, int, int]:
        amounts = await used(plane)
        return amounts.cpu_s, amounts.sent_bytes, amounts.received_bytes

    read(10.0, 100, 1000)
    await plane.service.checkpoint(CTX, "demo")
    await plane.service.checkpoint(CTX, "demo")
    assert await totals() == (10.0, 100, 1000), "a reading that is repeated adds nothing"
    read(12.5, 100, 1500)
    await plane.service.sleep(CTX, "demo")
    assert await totals() == (12.5, 100, 1500)
    await plane.service.wake(CTX, "demo")
    read(2.0, 150, 1500)  # another machine; the node counts egress on
    await plane.service.checkpoint(CTX, "demo")
    assert await totals() == (14.5, 150, 1500)
    await plane.crash(node_too=False)
    plane.node.counter = "another process"
    read(3.0, 7, 0)
    await plane.restart()
    await plane.service.delete(CTX, "demo")
    assert await totals() == (15.5, 157, 1500)
    await meters.check(plane.database, CTX.tenant_id)


async def test_what_callers_bring_and_take_is_counted_once_and_by_generation(plane: ControlPlane) -> None:
    made, _ = await plane.create(checkpoint_interval_s=0.0)

    async def totals() -> tuple[int, int]:
        amounts = await used(plane)
        return amounts.request_bytes, amounts.answer_bytes

    await plane.write("demo", "/x", b"x" * 1000)
    await plane.service.checkpoint(CTX, "demo")
    await plane.service.checkpoint(CTX, "demo")
    assert await totals() == (1000, 0), "a reading that is repeated adds nothing"
    assert await plane.read("demo", "/x") == b"x" * 1000
    await plane.service.sleep(CTX, "demo")
    assert await totals() == (1000, 1000)
    await plane.write("demo", "/x", b"y" * 10)  # another generation, whose link counts from nothing
    await plane.service.checkpoint(CTX, "demo")
    assert await totals() == (1010, 1000)
    await plane.write("demo", "/x", b"z" * 77)
    plane.node.die(made.id)
    await plane.until("demo", lambda workspace: workspace.state is WorkspaceState.HIBERNATED)
    assert await totals() == (1010, 1000), "of a machine that died the last reading counts"
    amounts = await used(plane)
    assert (amounts.sent_bytes, amounts.received_bytes) == (0, 0), "nor is any of it egress"
    await meters.check(plane.database, CTX.tenant_id)


async def test_bytes_of_requests_that_another_process_counts_are_added(plane: ControlPlane) -> None:
    made, _ = await plane.create(checkpoint_interval_s=0.0)
    await plane.write("demo", "/x", b"x" * 500)
    await plane.service.checkpoint(CTX, "demo")
    await plane.crash(node_too=False)  # the machine lives on, and whoever counts begins anew
    plane.node.counter = "another process"
    plane.node.machines[made.id].guest.moved.inward = 20
    await plane.restart()
    await plane.service.sleep(CTX, "demo")
    assert (await used(plane)).request_bytes == 520


async def test_of_a_machine_that_died_the_last_reading_counts(plane: ControlPlane) -> None:
    made, _ = await plane.create(checkpoint_interval_s=0.0)
    plane.node.machines[made.id].cpu_s = 4.0
    await plane.service.checkpoint(CTX, "demo")
    plane.node.machines[made.id].cpu_s = 9.0
    plane.node.die(made.id)
    await plane.until("demo", lambda workspace: workspace.state is WorkspaceState.HIBERNATED)
    assert (await used(plane)).cpu_s == 4.0


# ------------------------------------------------------------------------------------------------------------------- bytes

GROWN = b"x" * 50_000
DEVICES, PAGES = 1000, 40960  # what each snapshot of the fake node has beside files


async def weight(plane: ControlPlane, workspace_id: str) -> int:
    found = await meters.rows(
        plane.database,
        "select coalesce(sum(bytes), 0)::bigint as bytes from stored_spans"
        " where workspace_id = %s and place = 'node' and to_at is null",
        workspace_id,
    )
    return int(found[0]["bytes"])


async def test_stored_bytes_are_counted_as_long_as_they_are_stored(plane: ControlPlane) -> None:
    made, _ = await plane.create(checkpoint_interval_s=0.0)
    assert await weight(plane, made.id) == 0
    await plane.write("demo", "/file", GROWN)
    await plane.service.sleep(CTX, "demo")
    bytes_then = await weight(plane, made.id)
    assert bytes_then >= len(GROWN) + DEVICES + PAGES
    before = (await used(plane)).local_byte_s
    plane.database.shift_clock(10_000)
    grown = (await used(plane)).local_byte_s - before
    assert bytes_then * 10_000 <= grown <= bytes_then * (10_000 + NEAR.total_seconds())
    await plane.service.delete(CTX, "demo")
    assert await weight(plane, made.id) == 0
    after = (await used(plane)).local_byte_s
    plane.database.shift_clock(10_000)
    assert (await used(plane)).local_byte_s == after


async def test_what_a_removed_snapshot_added_is_still_paid_for_below_it(plane: ControlPlane) -> None:
    made, _ = await plane.create(checkpoint_interval_s=0.0, keep_snapshots=0)
    await plane.write("demo", "/file", GROWN)
    await plane.service.sleep(CTX, "demo")
    for _ in range(5):
        await plane.service.wake(CTX, "demo")
        await plane.service.sleep(CTX, "demo")
        await plane.service.upkeep.clean()
        (kept,) = [one.facts for one in plane.node.stored.values()]
        total = kept.memory_total_bytes + kept.disk_total_bytes + kept.device_bytes
        assert await weight(plane, made.id) == total, "it weighs all that it refers to, and no more"


async def test_a_promoted_branchs_snapshots_are_its_parents_from_then_on(plane: ControlPlane) -> None:
    made, _ = await plane.create(checkpoint_interval_s=0.0)
    (branch,) = await plane.service.fork(CTX, "demo", 1, names=("try",))
    await plane.write("try", "/file", GROWN)
    await plane.service.sleep(CTX, "try")
    assert not isinstance(branch, Exception)
    assert await weight(plane, branch.id) >= len(GROWN)
    await plane.service.promote(CTX, "try")
    assert await weight(plane, branch.id) == 0
    assert await weight(plane, made.id) >= len(GROWN)
    await meters.check(plane.database, CTX.tenant_id)


async def test_packs_count_from_their_upload_to_their_collection(plane: ControlPlane) -> None:
    await plane.create(checkpoint_interval_s=0.0)
    _, snapshot = await plane.service.sleep(CTX, "demo")
    tenant = CTX.tenant_id
    await plane.execute("insert into store_scopes (scope, tenant_id) values (%s, %s)", tenant, tenant)
    await plane.execute(
        "insert into store_items (scope, name, tenant_id, state, generation, heard_epoch) values (%s, %s, %s, 'uploading', 7, 0)",
        *(tenant, snapshot.id, tenant),
    )
    await plane.execute(
        "insert into store_packs (id, scope, tenant_id, state, generation, size, index_bytes)"
        " values ('pck_1', %s, %s, 'pending', 7, 5000, 10)",
        *(tenant, tenant),
    )
    await plane.execute("insert into store_holds values (%s, %s, 'pck_1', %s)", tenant, snapshot.id, tenant)
    assert (await used(plane)).uploaded_bytes == 0, "it is not there yet"
    for _ in range(2):
        await plane.execute("update store_packs set state = 'stored', whole = true where id = 'pck_1'")
    assert (await used(plane)).uploaded_bytes == 5000
    plane.database.shift_clock(1000)
    await plane.execute("update store_packs set state = 'condemned', condemned_epoch = 1 where id = 'pck_1'")
    plane.database.shift_clock(1000)
    at_end = (await used(plane)).store_byte_s
    assert 5000 * 2000 <= at_end <= 5000 * (2000 + NEAR.total_seconds())
    # The end is written by the clock of the server here, which nobody has shifted: the span ends where it began, never before.
    await plane.execute("update store_packs set state = 'deleting' where id = 'pck_1'")
    await plane.execute("delete from store_holds")
    await plane.execute("delete from store_packs")
    assert (await used(plane)).store_byte_s <= 5000 * NEAR.total_seconds()
    assert (await used(plane)).uploaded_bytes == 5000
