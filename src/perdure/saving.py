"""What backs an installation up, brings one back and makes a catalogue anew, without a server: composed here for ``wiring``.

The caller holds the home's lock, so that no server works here meanwhile.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import perdure
from perdure.backup import recover as recovering
from perdure.backup import restore as restoring
from perdure.backup.catalogue import Defaults
from perdure.backup.make import Bring, Origin, Progress
from perdure.backup.place import open_place
from perdure.backup.service import BackupService, as_event
from perdure.core import files
from perdure.core.clock import Clock, SystemClock, epoch_ms
from perdure.core.config import Settings
from perdure.core.errors import CorruptData, CorruptSnapshot, InvalidRequest, NotFound
from perdure.core.ids import NodeId
from perdure.core.keys import master_key
from perdure.db.database import Database, connect_migrated
from perdure.db.embedded import EmbeddedPostgres
from perdure.fleet.objects import StoreCatalogue
from perdure.images.registry import ImageStore
from perdure.snapshots.manifest import MANIFEST, Manifest
from perdure.snapshots.objects.client import ClientSettings
from perdure.snapshots.objects.keys import Keyring, PlainKeyring, ScopeKeys, TenantKeyring
from perdure.snapshots.objects.opening import open_remote, parse_options
from perdure.snapshots.store import SnapshotStore
from perdure.wire import public
from perdure.wire.objects import IMAGES, Scope

Show = Callable[[public.BackupEvent], None]


def backup_service(
    settings: Settings, clock: Clock, database: Database, store: SnapshotStore, images: ImageStore, bring: Bring | None = None
) -> BackupService:
    """Backups of what is open here."""
    origin = Origin(
        release=perdure.__version__,
        database=database,
        store=store,
        images=images,
        clock=clock,
        home=settings.home,
        scratch=settings.run_dir,
        master=master_key(settings.master_key_file, settings.store_keys_dir),
        keys_dir=settings.store_keys_dir,
        sealed=settings.store_encryption,
        bring=bring,
    )
    return BackupService(origin, lambda: client_settings(settings))


def client_settings(settings: Settings) -> ClientSettings:
    """How a place in an object store is spoken to: with the options of the installation's own store."""
    return ClientSettings(parse_options(settings.store_options))


async def back_up(settings: Settings, spec: public.MakeBackup, show: Show) -> public.BackupInfo:
    """A backup of a home in which no server runs."""
    restoring.check_finished(settings.home)
    if not (settings.home / "node.id").is_file():
        raise NotFound(
            f"There is nothing to back up: no server has run with the home {settings.home}.", hint="Check PERDURE_HOME."
        )
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        database = await connect_migrated(await stack.enter_async_context(_database(settings)))
        stack.push_async_callback(database.close)
        store = SnapshotStore(settings.store)
        store.open()
        stack.callback(store.close)
        service = backup_service(settings, clock, database, store, ImageStore(settings.images))
        await service.start()
        return await service.make_to(spec, lambda progress: show(as_event(progress)))


async def restore(
    settings: Settings,
    given: str,
    backup_id: str | None,
    show: Show,
    node_id: Callable[[], NodeId],
    *,
    skip_damaged: bool = False,
) -> public.RestoredInfo:
    """A backup into this home, which must be empty."""
    clock = SystemClock()
    place = open_place(given, lambda: epoch_ms(clock), make=False, options=client_settings(settings))
    to = restoring.Destination(settings, ImageStore(settings.images), node_id)

    def told(progress: Progress) -> None:
        show(as_event(progress))

    ready = await restoring.prepare(to, place, backup_id, skip_damaged=skip_damaged)
    async with _database(settings) as url:
        done = await restoring.restore(to, place, ready, url, told)
    return public.RestoredInfo(
        backup=done.record.id,
        of=done.record.created_at,
        workspaces=done.workspaces,
        snapshots=done.snapshots,
        set_back=list(done.set_back),
        unsaved=list(done.unsaved),
        lost=list(done.lost),
        skipped=list(done.skipped),
    )


async def recover(settings: Settings, show: Show, node_id: Callable[[], NodeId]) -> public.RecoveredInfo:
    """A catalogue of what the object store has, in an empty database."""
    restoring.check_finished(settings.home)
    if settings.store_url is None:
        raise InvalidRequest("No object store is named that a catalogue could be made from.", hint="Set PERDURE_STORE_URL.")
    clock = SystemClock()
    remote = open_remote(settings.store_url, settings.store_options, _keyring(settings), lambda: epoch_ms(clock))
    async with AsyncExitStack() as stack:
        database = await connect_migrated(await stack.enter_async_context(_database(settings)))
        stack.push_async_callback(database.close)
        into = recovering.Into(
            database,
            node_id,
            Defaults(settings.idle_timeout_s, settings.checkpoint_interval_s),
            here(settings.store),
        )

        def told(scope: str) -> None:
            show(public.BackupEvent(type="progress", what="images" if scope == IMAGES else "snapshots", name=scope))

        done = await recovering.recover(remote, StoreCatalogue(database), into, told)
    return public.RecoveredInfo(
        workspaces=list(done.workspaces),
        snapshots=done.snapshots,
        only_here=done.only_here,
        nameless=list(done.nameless),
        incomplete=list(done.incomplete),
        damaged=done.damaged,
        kept_until=done.kept_until,
    )


def here(store: Path) -> recovering.Here:
    """The complete snapshots in a directory that may be there. It is not opened as a store: what the server's start has to look
    at stays as it is."""
    manifests, damaged = list[Manifest](), dict[str, str]()
    for path in sorted(store.glob(f"snapshots/snp_*/{MANIFEST}")):
        name = f"snapshots/{path.parent.name}"
        try:
            manifest = Manifest.from_bytes(path.read_bytes(), f"{name}/{MANIFEST}")
        except CorruptSnapshot as error:
            damaged[name] = error.message
            continue
        if manifest.snapshot_id == path.parent.name:
            manifests.append(manifest)
        else:
            damaged[name] = f"It belongs to {manifest.snapshot_id}."
    return recovering.Here(tuple(manifests), damaged)


class _KnownKeys(TenantKeyring):
    """Makes no key: what was sealed with one that is lost cannot be read with a new one."""

    def __init__(self, directory: Path, master: bytes) -> None:
        super().__init__(directory, master)
        self._where = directory

    def of(self, scope: Scope) -> ScopeKeys:
        if scope != IMAGES and not (self._where / f"{scope}.key").exists():
            raise CorruptData(
                f"The key of tenant {scope} is not in {self._where}, so nothing that it has in the object store can be read.",
                hint="Bring the directory 'keys' and 'master.key' of the lost home back, from a backup for instance.",
            )
        return super().of(scope)


def _keyring(settings: Settings) -> Keyring:
    if not settings.store_encryption:
        return PlainKeyring()
    if not settings.master_key_file.exists():
        raise InvalidRequest(
            "The object store is encrypted, and the master key that opens it is not here.",
            hint=f"Put the key into {settings.master_key_file} (mode 0600), and the directory 'keys' of the lost home beside it.",
        )
    return _KnownKeys(settings.store_keys_dir, master_key(settings.master_key_file, settings.store_keys_dir))


@asynccontextmanager
async def _database(settings: Settings) -> AsyncIterator[str]:
    """URL of the installation's database; the embedded one is started and stopped again."""
    if settings.database_url is not None:
        yield settings.database_url
        return
    files.make_dir(settings.home)
    embedded = EmbeddedPostgres(settings.home)
    url = await embedded.start()
    try:
        yield url
    finally:
        await embedded.stop()
