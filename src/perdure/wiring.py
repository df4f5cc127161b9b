"""The composition root: the only place that constructs services. ``serve`` is one process with API, node and embedded database.

Order of a start: lock the home, database, migrations, lease, node (which kills what an earlier process left), workspaces (which
repair themselves), API. The end is the same backwards: no more requests, every workspace hibernated, then the rest.

SIGTERM, SIGINT and SIGHUP ask for that end; asked again, it goes on as before, for impatience must not cost anybody's memory.
SIGQUIT insists (``perdure down --now``, or Ctrl-\\ in a terminal): whatever is not asleep is given up.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from perdure import fitness, saving, telling
from perdure.access import signatures, tokens
from perdure.access.audit import DAY_S, Audit
from perdure.access.quotas import Quotas
from perdure.access.service import AccessService
from perdure.access.shares import ShareService
from perdure.api.guest import create_guest_app
from perdure.api.handles import PURPOSE, Handles
from perdure.api.ingress.names import Domain
from perdure.api.keys import ensure_key_file
from perdure.api.server import ApiServer
from perdure.api.services import Services
from perdure.backup.restore import check_finished
from perdure.backup.service import BackupService
from perdure.core import collector, crashpoints, files, ids, keys, logs
from perdure.core.clock import Clock, SystemClock, epoch_ms
from perdure.core.config import Settings, notify_socket
from perdure.core.errors import Conflict, HostUnfit, InvalidRequest, PerdureError, Unavailable
from perdure.core.ids import NodeId
from perdure.db.database import Database, connect_migrated
from perdure.db.embedded import EmbeddedPostgres
from perdure.db.keeper import DatabaseKeeper
from perdure.ending import Ending
from perdure.fleet.nodes import NodeRegistry
from perdure.fleet.objects import NodeKeys, StoreCatalogue
from perdure.fleet.placement import LocalPlacement
from perdure.gateway.egress import Dialer, EgressGateway
from perdure.gateway.ingress import GuestPorts
from perdure.gateway.rules import EgressRules
from perdure.gateway.selfservice import SelfService
from perdure.gauges import ServerGauges
from perdure.images.golden import GoldenSpec
from perdure.images.model import Image
from perdure.images.progress import ProgressSink, silent
from perdure.images.registry import ImageStore
from perdure.images.service import ImageService, as_event
from perdure.machines.driver import Accelerator
from perdure.machines.qemu import QemuDriver
from perdure.metering.usage import Metering
from perdure.node import accelerator
from perdure.node.doctor import examine
from perdure.node.lease import LeaseKeeper
from perdure.node.secondhome import ObjectParts
from perdure.node.supervisor import NodeParts, NodeSupervisor
from perdure.runs.engine import Rules
from perdure.runs.service.heads import PURPOSE as HEADS
from perdure.runs.service.heads import SignedHeads
from perdure.runs.service.histories import StoredHistories
from perdure.runs.service.service import ExecutionService
from perdure.snapshots.objects import opening
from perdure.snapshots.objects.keys import Keyring, PlainKeyring, TenantKeyring
from perdure.wire import public
from perdure.wire.node import Confinement, SecondHome
from perdure.wire.objects import IMAGES
from perdure.workspaces.exec_keys import KeyedExecs, StoredExecKeys
from perdure.workspaces.model import Context
from perdure.workspaces.service import WorkspaceService
from perdure.workspaces.store import WorkspaceStore
from perdure.workspaces.tools import Tools

#: What ``perdure create`` takes without ``--image``; its pool is filled at the start.
DEFAULT_IMAGE = "base"

log = structlog.get_logger(__name__)


# ------------------------------------------------------------------------------------------------------------ entry points


def serve(settings: Settings) -> int:
    """``perdure up`` in the foreground: returns 0 after SIGTERM or SIGINT, when every workspace sleeps. Raises PerdureError."""
    logs.configure(settings)
    crashpoints.arm(settings.crash_file)
    with _locked(settings), telling.traces():
        check_finished(settings.home)
        if settings.store_url is not None:
            opening.check(settings.store_url, settings.store_options)  # a mistake is told before a database is made
        if settings.ingress_domain is not None:
            Domain.parse(settings.ingress_domain)
        return asyncio.run(_serve(settings))


async def build_image(settings: Settings, spec: public.BuildImage, show: Callable[[public.BuildEvent], None]) -> public.ImageInfo:
    """Build in this process, without a server. ``show`` gets progress."""
    driver = fitness.driver(settings)
    images = ImageStore(settings.images)

    @asynccontextmanager
    async def nobody(_digest: str) -> AsyncIterator[list[str]]:
        yield []

    service = ImageService(images, _golden_maker(settings, images, driver), nobody)
    return await service.build_to(spec, lambda progress: show(as_event(progress)))


def back_up(settings: Settings, spec: public.MakeBackup, show: saving.Show) -> public.BackupInfo:
    """``perdure backup`` of a home in which no server runs."""
    crashpoints.arm(settings.crash_file)
    with _locked(settings):
        return asyncio.run(saving.back_up(settings, spec, show))


def restore(
    settings: Settings, place: str, backup_id: str | None, show: saving.Show, *, skip_damaged: bool = False
) -> public.RestoredInfo:
    """``perdure restore`` into a home that is empty, or into which the same restore was interrupted."""
    crashpoints.arm(settings.crash_file)
    with _locked(settings):
        node = partial(_node_id, settings, SystemClock())
        return asyncio.run(saving.restore(settings, place, backup_id, show, node, skip_damaged=skip_damaged))


def recover_from_store(settings: Settings, show: saving.Show) -> public.RecoveredInfo:
    """``perdure recover --from-store`` into a home without a database."""
    crashpoints.arm(settings.crash_file)
    with _locked(settings):
        return asyncio.run(saving.recover(settings, show, lambda: _node_id(settings, SystemClock())))


# ------------------------------------------------------------------------------------------------------------------- serve


async def _serve(settings: Settings) -> int:
    ending = Ending(settings, notify_socket())
    ending.listen()
    async with _running(settings, ending) as server:
        collector.resume()
        log.info("serving", socket=str(settings.api_socket), port=server.port, key_file=str(settings.api_key_file))
        ending.serving()
        await ending.asked.wait()
        log.info("stopping: every workspace is hibernated first")
    log.info("stopped")
    return 0


@asynccontextmanager
async def _running(settings: Settings, ending: Ending) -> AsyncIterator[ApiServer]:
    """Everything, started; ended in reverse order."""
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(_database(settings))
        control = await stack.enter_async_context(_control_plane(settings, clock, database, ending))
        audit = Audit(database, clock, _node_id(settings, clock), settings.audit_keep_days)
        await audit.start()
        stack.push_async_callback(audit.close)
        feed, webhooks = await stack.enter_async_context(telling.events(settings, clock, database))
        services = Services(
            workspaces=control.workspaces,
            keyed_execs=KeyedExecs(StoredExecKeys(database)),
            images=_ApiImages(control.images, control.node),
            backups=_ApiBackups(control.backups),
            metering=Metering(database),
            doctor=lambda: examine(settings, control.driver, control.images.store),
            foresee_egress=control.dialer.foresee,
            access=_access(settings, database, clock),
            settings=settings,
            clock=clock,
            ports=control.ports,
            shares=ShareService(database, _derived(settings, tokens.PURPOSE), clock),
            gauges=ServerGauges(database, control.workspaces, control.node).read,
            quotas=Quotas(database),
            audit=audit,
            feed=feed,
            webhooks=webhooks,
            executions=await _executions(stack, settings, database, clock),
            confinement=control.confinement,
            histories=StoredHistories(database, _heads(stack, settings, database)),
        )
        server = ApiServer(services)
        await server.start()
        stack.push_async_callback(server.stop)
        yield server


async def _executions(stack: AsyncExitStack, settings: Settings, database: Database, clock: Clock) -> ExecutionService:
    rules = Rules(
        operations_max=settings.execution_operations_max,
        history_bytes_max=settings.execution_history_mib << 20,
        payload_bytes_max=settings.execution_payload_mib << 20,
    )
    executions = ExecutionService(database, clock, rules, settings.execution_keep_days * DAY_S or None)
    await executions.start()
    stack.push_async_callback(executions.close)
    return executions


def _heads(stack: AsyncExitStack, settings: Settings, database: Database) -> SignedHeads:
    """Signed by the hour into the object store, or, without one, into the home."""
    url = settings.store_url or (settings.home / "history").absolute().as_uri()
    objects = opening.open_objects_only(url, settings.store_options if settings.store_url else ())
    heads = SignedHeads(database, objects, _derived(settings, HEADS))
    heads.start()
    stack.push_async_callback(heads.close)
    return heads


@asynccontextmanager
async def _database(settings: Settings) -> AsyncIterator[Database]:
    async with AsyncExitStack() as stack:
        if settings.database_url is not None:
            yield await _connected(stack, settings.database_url)
            return
        embedded = EmbeddedPostgres(settings.home)
        url = await embedded.start()
        stack.push_async_callback(embedded.stop)
        database = await _connected(stack, url)
        keeper = DatabaseKeeper(embedded, database.renew)
        keeper.start()
        stack.push_async_callback(keeper.close)
        yield database


async def _connected(stack: AsyncExitStack, url: str) -> Database:
    database = await connect_migrated(url)
    stack.push_async_callback(database.close)
    return database


@dataclass(frozen=True, slots=True)
class _ControlPlane:
    workspaces: WorkspaceService
    images: ImageService
    backups: BackupService
    driver: QemuDriver
    node: NodeSupervisor
    dialer: Dialer
    ports: GuestPorts
    confinement: Confinement | None


@asynccontextmanager
async def _control_plane(settings: Settings, clock: Clock, database: Database, ending: Ending) -> AsyncIterator[_ControlPlane]:
    """Node and workspaces, repaired and watched over; at the end everything awake is hibernated."""
    driver = fitness.driver(settings)
    image_store = ImageStore(settings.images)
    guest_app = _LateApp()
    dialer = Dialer(EgressRules.parse(settings.egress_private_allow))
    ports = GuestPorts()
    chosen = (await accelerator.choose(settings, driver, image_store)).accelerator
    node = NodeSupervisor(
        NodeParts(
            node_id=_node_id(settings, clock),
            settings=settings,
            clock=clock,
            driver=driver,
            accelerator=chosen,
            images=image_store,
            objects=await _objects(settings, clock, database),
            egress=EgressGateway(dialer, audit=telling.audit),
            selfservice=SelfService(guest_app, report=_report_defect),
            ports=ports,
        )
    )
    store = WorkspaceStore(database)
    images = ImageService(image_store, _golden_maker(settings, image_store, driver), store.needing_image)
    tools = Tools(store, LocalPlacement(node), _Catalog(images), settings, clock, EgressRules.parse)
    async with AsyncExitStack() as stack:
        foreseeing = asyncio.create_task(_foreseen(driver, chosen), name="foresee-confinement")
        stack.callback(foreseeing.cancel)
        registry = NodeRegistry(database, lease_s=settings.lease_s)
        await registry.register(node.node_id)
        stack.push_async_callback(registry.release, node.node_id)  # nobody has to wait until the lease of a stopped node is over
        if node.second_home is not None:
            await _claim(node.second_home)
        await node.open()
        stack.push_async_callback(node.close)
        stack.push_async_callback(ports.close)
        lease = LeaseKeeper(registry, node.node_id, clock, settings.freeze_s, node.pids, node.lease_changed)
        await lease.start()
        stack.push_async_callback(lease.close)
        workspaces = WorkspaceService(tools)
        handles = Handles(_derived(settings, PURPOSE))
        guest_app.app = create_guest_app(workspaces, clock, handles)
        bring = None if node.second_home is None else node.second_home.fetch
        backups = saving.backup_service(settings, clock, database, node.snapshot_store, image_store, bring)
        await backups.start()
        backups.watch()
        stack.push_async_callback(backups.close)
        await workspaces.start()
        stack.push_async_callback(workspaces.shutdown, ending.order)
        await _warm(node, image_store)
        yield _ControlPlane(workspaces, images, backups, driver, node, dialer, ports, await foreseeing)


async def _foreseen(driver: QemuDriver, chosen: Accelerator) -> Confinement | None:
    """What holds for workspaces here, as each answer says; None where QEMU or a jail that is required is missing."""
    try:
        return await driver.foresee(chosen)
    except HostUnfit as error:
        log.warning("no workspace can run here", error=error.message, hint=error.hint)
        return None


async def _warm(node: NodeSupervisor, images: ImageStore) -> None:
    """Have a machine ready for the image that is most likely asked for; without a golden the first create makes it."""
    if DEFAULT_IMAGE not in images.names():
        return
    image = await asyncio.to_thread(images.resolve, DEFAULT_IMAGE)
    if images.goldens(image):
        try:
            await node.warm(image.digest, image.default_size)
        except PerdureError as error:  # an image of another release, say: what it is good for is told to who asks for it
            log.warning("no machine is kept warm", image=image.name, error=error.message, hint=error.hint)


# ------------------------------------------------------------------------------------------------------------------- parts


async def _objects(settings: Settings, clock: Clock, database: Database) -> ObjectParts | None:
    """The object store, where one is named. Raises InvalidRequest in one sentence for a URL or an option that is none."""
    if settings.store_url is None:
        return None
    keyring: Keyring = PlainKeyring()
    sealed: TenantKeyring | None = None
    is_sealed = any(settings.store_keys_dir.glob("*.key"))
    if settings.store_encryption:
        if not is_sealed and await database.one("homes.any_stored", images=IMAGES) is not None:
            raise _other_encryption(settings, "has snapshots that are not encrypted, or the tenants' keys are missing")
        keyring = sealed = TenantKeyring(
            settings.store_keys_dir, keys.master_key(settings.master_key_file, settings.store_keys_dir)
        )
    elif is_sealed:
        raise _other_encryption(settings, "is encrypted: there are tenants' keys")
    remote = opening.open_remote(settings.store_url, settings.store_options, keyring, lambda: epoch_ms(clock))
    row = await database.one("homes.installation")
    assert row is not None, "a migration has made it"
    own = None if sealed is None else NodeKeys(_node_id(settings, clock), sealed.mark)
    return ObjectParts(remote, StoreCatalogue(database, of_snapshots=True, keys=own, epoch_s=settings.store_collect_s), row["id"])


def _other_encryption(settings: Settings, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"PERDURE_STORE_ENCRYPTION is {str(settings.store_encryption).lower()}, but the object store {why}.",
        hint="Set it as it was when the store was first used, for a store cannot be read both ways; if "
        f"{settings.store_keys_dir} is lost, restore it from a backup.",
    )


async def _claim(home: SecondHome) -> None:
    """Somebody else's store is refused at once. One that does not answer keeps nobody from waking: uploads wait for it."""
    try:
        await home.claim()
    except Unavailable as error:
        log.warning("the object store does not answer; uploads are tried again", error=error.message, hint=error.hint)


def _golden_maker(settings: Settings, images: ImageStore, driver: QemuDriver) -> Callable[[Image, ProgressSink], Any]:
    async def make(image: Image, progress: ProgressSink = silent) -> GoldenSpec:
        verdict = await accelerator.choose(settings, driver, images)
        return GoldenSpec(image, image.default_size, images, driver, verdict.accelerator, settings.machines_dir, progress)

    return make


def _node_id(settings: Settings, clock: Clock) -> NodeId:
    """This node's id, made at first start and kept in the home."""
    path = settings.home / "node.id"
    if not path.is_file():
        files.make_dir(settings.home)
        files.write_file(path, ids.mint("nod", now_ms=epoch_ms(clock)).encode())
    return NodeId(path.read_text().strip())


def _access(settings: Settings, database: Database, clock: Clock) -> AccessService:
    return AccessService(database, clock, ensure_key_file(settings.api_key_file), _derived(settings, signatures.PURPOSE))


def _derived(settings: Settings, purpose: str) -> bytes:
    """A key of the master key's."""
    return keys.derive(keys.master_key(settings.master_key_file, settings.store_keys_dir), purpose)


@contextmanager
def _locked(settings: Settings) -> Iterator[None]:
    """One server per home."""
    files.make_dir(settings.run_dir, mode=0o700)
    descriptor = os.open(settings.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Conflict(
            f"Another Perdure server runs with the home {settings.home}.", hint="Use it, or stop it with 'perdure down'."
        ) from error
    else:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, b"%d\n" % os.getpid())
        yield
    finally:
        os.close(descriptor)


def _report_defect(what: str, error: BaseException) -> None:
    log.error("the guest's API failed", what=what, exc_info=error)


class _LateApp:
    """The guest's API needs the workspaces, which need the node, which serves the guest's API."""

    app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


class _Catalog:
    """``ImageService`` as the workspaces see it."""

    def __init__(self, images: ImageService) -> None:
        self._images = images

    async def find(self, ref: str) -> Image:
        return await self._images.find_one(ref)


class _ApiBackups:
    """``BackupService`` as the API sees it. A backup is the operator's, so the caller's tenant does not matter yet."""

    def __init__(self, backups: BackupService) -> None:
        self._backups = backups

    def make(self, _ctx: Context, spec: public.MakeBackup) -> AsyncIterator[public.BackupEvent]:
        return self._backups.make(spec)


class _ApiImages:
    """``ImageService`` as the API sees it, and the node told of what changes. Images belong to the node's operator, so the
    caller's tenant does not matter yet."""

    def __init__(self, images: ImageService, node: NodeSupervisor) -> None:
        self._images = images
        self._node = node

    async def find(self, _ctx: Context) -> list[public.ImageInfo]:
        return await self._images.all()

    async def recipes(self, _ctx: Context) -> list[public.RecipeInfo]:
        return await self._images.recipes()

    async def get(self, _ctx: Context, ref: str) -> public.ImageInfo:
        return await self._images.get(ref)

    async def remove(self, _ctx: Context, ref: str) -> None:
        digest = (await self._images.find_one(ref)).digest
        await self._images.remove(ref)
        await self._node.retire(digest)

    async def prune(self, _ctx: Context) -> public.PrunedImages:
        pruned = await self._images.prune()
        for image in pruned.removed:
            await self._node.retire(image.digest)
        return pruned

    async def build(self, _ctx: Context, spec: public.BuildImage) -> AsyncIterator[public.BuildEvent]:
        """No warm machine waits for an image that has lost its name."""
        before = self._images.store.names()
        async with aclosing(self._images.build(spec)) as events:
            async for event in events:
                yield event
        after = self._images.store.names()
        for name, digest in before.items():
            if after.get(name) != digest:
                await self._node.retire(digest)
        await _warm(self._node, self._images.store)
