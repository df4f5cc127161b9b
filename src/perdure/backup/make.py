"""Making a backup of a server that goes on working.

1. The place is asked whether it holds backups, or nothing; what is begun is put on record there.
2. An instant of the database is frozen. Every complete snapshot that it names gets a row that says that this backup needs it, so
   that neither retention nor its owner removes it; one that was removed in between means another instant.
3. That instant is dumped.
4. Images, snapshots and the dump are uploaded. What the place has already, whole, is not sent again.
5. The backup's manifest is written. Now the backup exists.
6. The rows go.

A server that is killed in between leaves rows, which its next start removes, and objects, which the next backup finds.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from perdure.backup.place import Place, Tools
from perdure.backup.record import BackupRecord, LeftOut, StoredItem
from perdure.core import files
from perdure.core.clock import Clock
from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import CorruptData, CorruptSnapshot, NoSpace, NotFound, PerdureError, Shredded, Unavailable
from perdure.core.ids import DEFAULT_TENANT, SnapshotId, TenantId
from perdure.core.keys import derive
from perdure.db import dump as database_dump
from perdure.db import migrations
from perdure.db.database import Database
from perdure.images.moving import ImageMover
from perdure.images.registry import ImageStore
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.manifest import BaseRef, Manifest
from perdure.snapshots.objects.chunks import file_source
from perdure.snapshots.objects.keys import Keyring, PlainKeyring, TenantKeyring
from perdure.snapshots.objects.local import Mover, disk_key, image_key, snapshot_key
from perdure.snapshots.objects.upload import Contents, Moved, Uploader
from perdure.snapshots.store import SnapshotStore
from perdure.wire.objects import Item, ItemKey, ItemState, Scope
from perdure.workspaces.facts import facts_of

#: Instants that are tried when snapshots go while they are being held; each takes milliseconds.
INSTANTS_MAX = 10
#: How often a snapshot is brought to this node that leaves it again.
BRINGS_MAX = 3
KEY_MARK = "backup key-mark"


@dataclass(frozen=True, slots=True)
class Progress:
    """``what`` is database, images or snapshots; ``done`` of ``count`` are there. ``sent_bytes`` in all, as stored."""

    what: Literal["database", "images", "snapshots"]
    name: str
    done: int
    count: int
    sent_bytes: int
    reused_chunks: int


Told = Callable[[Progress], None]


#: Has a snapshot's files on this node, wherever else they are.
Bring = Callable[[SnapshotId, TenantId], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Origin:
    """The installation that is backed up."""

    release: str
    database: Database
    store: SnapshotStore
    images: ImageStore
    clock: Clock
    home: Path
    scratch: Path
    master: bytes | None
    keys_dir: Path
    sealed: bool = False
    bring: Bring | None = None

    def keyring(self) -> Keyring:
        if not self.sealed:
            return PlainKeyring()
        assert self.master is not None, "whoever seals has a key"
        return TenantKeyring(self.keys_dir, self.master)


@dataclass(frozen=True, slots=True)
class Made:
    """A backup that exists. ``sent_bytes`` is what it cost the place, as stored; ``reused_chunks`` were there already. ``awake``:
    names of workspaces that ran, which are in it as of their last snapshot."""

    record: BackupRecord
    sent_bytes: int
    reused_chunks: int
    content_bytes: int
    awake: tuple[str, ...]


@dataclass(slots=True)
class _Run:
    """One backup under way. ``bad_images``: those that were found damaged, so that they are not read again for each snapshot."""

    id: str
    origin: Origin
    tools: Tools
    told: Told
    skip_damaged: bool = False
    moved: Moved = field(default_factory=Moved)
    left_out: list[LeftOut] = field(default_factory=list)
    bad_images: dict[BaseRef, PerdureError] = field(default_factory=dict)

    def add(self, moved: Moved) -> None:
        for name in ("chunks", "content_bytes", "reused", "packs", "sent_bytes"):
            setattr(self.moved, name, getattr(self.moved, name) + getattr(moved, name))

    def tell(self, what: Literal["database", "images", "snapshots"], name: str, done: int, count: int) -> None:
        self.told(Progress(what, name, done, count, self.moved.sent_bytes, self.moved.reused))


@dataclass(frozen=True, slots=True)
class _Instant:
    """What the frozen database names."""

    snapshots: Sequence[dict[str, Any]]
    workspaces: Sequence[dict[str, Any]]
    major: int
    schema: str
    path: Path


async def make(
    origin: Origin, place: Place, backup_id: str, told: Told, *, with_master_key: bool = False, skip_damaged: bool = False
) -> Made:
    """Raises Conflict when the place holds something else, CorruptSnapshot naming what is damaged here, unless ``skip_damaged``
    leaves it out, NoSpace, Unavailable or HostUnfit. After a failure no backup of this id exists; what was sent is used by the
    next one."""
    await asyncio.to_thread(_check_key, origin)
    with _Explained(place):
        await place.prepare()
        await place.begin(backup_id)
    crashpoint(CrashPoint.BACKUP_BEGUN)
    run = _Run(backup_id, origin, place.tools(origin.keyring()), told, skip_damaged)
    files.make_dir(origin.scratch, mode=0o700)
    with tempfile.TemporaryDirectory(prefix=f"{files.TEMPORARY}backup-", dir=origin.scratch) as scratch:
        try:
            instant = await _hold(run, Path(scratch) / "database.dump")
            with _Explained(place):
                record = await _send(run, instant, with_master_key=with_master_key)
                crashpoint(CrashPoint.BACKUP_SENT)
                await place.finish(record)
            crashpoint(CrashPoint.BACKUP_FINISHED)
        finally:
            await _let_go(run)
    awake = tuple(row["name"] for row in instant.workspaces if row["state"] not in ("hibernated", "failed"))
    return Made(record, run.moved.sent_bytes, run.moved.reused, run.moved.content_bytes, awake)


async def _let_go(run: _Run) -> None:
    """A database that is away now is told when it is back, by ``BackupService.reap``, or by the next start."""
    try:
        await asyncio.shield(run.origin.database.run("backup.let_go", holder=run.id))
    except Unavailable:
        return


# ---------------------------------------------------------------------------------------------------------------- the database


async def _hold(run: _Run, path: Path) -> _Instant:
    """Freeze an instant, hold its snapshots, dump it."""
    database = run.origin.database
    for _ in range(INSTANTS_MAX):
        async with database_dump.frozen(database.url) as frozen:
            snapshots = await frozen.rows.all("backup.snapshots")
            wanted = sorted(row["id"] for row in snapshots)
            async with database.transaction() as tx:
                await tx.run("backup.hold", ids=wanted, holder=run.id)
                held = {row["snapshot_id"] for row in await tx.all("backup.held", holder=run.id)}
            if not held >= set(wanted):
                continue  # one has been removed since the instant; a later one does not name it
            crashpoint(CrashPoint.BACKUP_HELD)
            workspaces = await frozen.rows.all("backup.workspaces")
            run.tell("database", "", 0, 1)
            await database_dump.dump(frozen, path)
            schema = await asyncio.to_thread(migrations.current, database.url)
            crashpoint(CrashPoint.BACKUP_DUMPED)
            return _Instant(snapshots, workspaces, frozen.major, schema or "", path)
    raise Unavailable("Snapshots were removed faster than a backup could hold them.", hint="Try again in a moment.")


# -------------------------------------------------------------------------------------------------------------------- the bytes


async def _send(run: _Run, instant: _Instant, *, with_master_key: bool) -> BackupRecord:
    origin = run.origin
    images: dict[BaseRef, StoredItem] = {}
    mover = Mover(origin.store, _Counting(run), run.tools.downloader, lambda base: ram_of(origin.images, base))
    snapshots = []
    for done, row in enumerate(instant.snapshots):
        run.tell("snapshots", row["id"], done, len(instant.snapshots))
        if (saved := await _saved(run, mover, row, images, instant)) is not None:
            snapshots.append(_stored(saved))
        crashpoint(CrashPoint.BACKUP_SNAPSHOT_SENT)
    run.tell("snapshots", "", len(instant.snapshots), len(instant.snapshots))
    await _bare_images(run, instant, images)
    key = ItemKey(Scope(DEFAULT_TENANT), f"database-{run.id}")
    dumped, _ = await _Counting(run).upload(Contents(key, [file_source("database.dump", instant.path)]))
    run.tell("database", "", 1, 1)
    await asyncio.to_thread(_check_key, origin)  # again: it may have been thrown away meanwhile
    return BackupRecord(
        id=run.id,
        created_at=origin.clock.now(),
        release=origin.release,
        schema=instant.schema,
        postgres=instant.major,
        dump=_stored(dumped),
        images=tuple(images.values()),
        snapshots=tuple(snapshots),
        names=await asyncio.to_thread(_names, origin.images, {base.image for base in images}),
        workspaces=len(instant.workspaces),
        sealed=origin.sealed,
        key_mark=None if origin.master is None else key_mark(origin.master),
        keys=await asyncio.to_thread(_wrapped_keys, origin) if origin.sealed else {},
        master_key=base64.b64encode(origin.master).decode() if with_master_key and origin.master is not None else None,
        left_out=tuple(run.left_out),
    )


async def _bare_images(run: _Run, instant: _Instant, images: dict[BaseRef, StoredItem]) -> None:
    """Those of workspaces that have no snapshot yet, or of which none could be saved."""
    covered = {base.image for base in images}
    for digest in sorted({row["image"] for row in instant.workspaces} - covered):
        if not await asyncio.to_thread(_is_here, run.origin.images, digest):
            continue
        try:
            await _image(run, BaseRef(digest, None), images)
        except CorruptData as error:
            if not run.skip_damaged:
                raise
            unborn = [row["name"] for row in instant.workspaces if row["image"] == digest and row["head_snapshot_id"] is None]
            run.left_out += [LeftOut(None, name, error.message) for name in unborn]


async def _image(run: _Run, base: BaseRef, images: dict[BaseRef, StoredItem]) -> None:
    """Once in a backup. One that is there, whole, from an earlier backup is not even read: what it is called is made once."""
    if base in images:
        return
    if base in run.bad_images:
        raise run.bad_images[base].twin()
    run.tell("images", base.image[:12], len(images), len(images) + 1)
    item = await _kept(run, image_key(base))
    if item is None:
        try:
            item, _ = await ImageMover(run.origin.images, _Counting(run), run.tools.downloader).upload(base)
        except CorruptData as error:
            run.bad_images[base] = error
            raise
    images[base] = _stored(item)
    crashpoint(CrashPoint.BACKUP_IMAGE_SENT)


async def _kept(run: _Run, key: ItemKey) -> Item | None:
    with contextlib.suppress(NotFound):
        item = await run.tools.ledger.item(key)
        return item if item.state is ItemState.DURABLE else None
    return None


async def _saved(
    run: _Run, mover: Mover, row: Mapping[str, Any], images: dict[BaseRef, StoredItem], instant: _Instant
) -> Item | None:
    """A snapshot; or, where what is damaged is skipped, what of it can be saved: its disk, or nothing."""
    try:
        return await _snapshot(run, mover, row, images)
    except (CorruptData, NotFound) as error:
        if not run.skip_damaged:
            with _named(row, instant):
                raise
        damage = error
    disk = None
    with contextlib.suppress(CorruptData, NotFound):
        disk = await _disk(run, mover, row, images)
    heads = tuple(one["id"] for one in instant.workspaces if one["head_snapshot_id"] == row["id"])
    run.left_out.append(LeftOut(row["id"], _name_of(row, instant), damage.message, disk is not None, heads))
    return disk


async def _disk(run: _Run, mover: Mover, row: Mapping[str, Any], images: dict[BaseRef, StoredItem]) -> Item | None:
    """The disk of a snapshot whose memory cannot be saved. It has a name of its own: a later backup may find the whole."""
    manifest = run.origin.store.manifest(SnapshotId(row["id"]))
    if manifest.memory is None:
        return None
    await _image(run, BaseRef(manifest.disk_base.image, manifest.disk_base.golden), images)
    item = await _kept(run, disk_key(manifest))
    if item is None:
        facts = await facts_of(run.origin.database, manifest.snapshot_id)
        item, _ = await mover.upload(manifest.snapshot_id, (), facts, disk_only=True)
    return item


def _name_of(row: Mapping[str, Any], instant: _Instant) -> str:
    """Of the workspace that a snapshot is of; of one that is deleted, its id."""
    names = (str(one["name"]) for one in instant.workspaces if one["id"] == row["workspace_id"])
    return next(names, str(row["workspace_id"]))


async def _snapshot(run: _Run, mover: Mover, row: Mapping[str, Any], images: dict[BaseRef, StoredItem]) -> Item:
    """A snapshot and what it lies on. It never changes, so one that is there, whole, from an earlier backup is not read."""
    for attempt in range(1, BRINGS_MAX + 1):
        manifest = await _local(run.origin, SnapshotId(row["id"]), TenantId(row["tenant_id"]))
        for base in bases_of(manifest):
            await _image(run, base, images)
        item = await _kept(run, snapshot_key(manifest))
        if item is not None:
            return item
        facts = await facts_of(run.origin.database, manifest.snapshot_id)
        try:
            item, _ = await mover.upload(manifest.snapshot_id, (), facts)
        except NotFound:  # its files have left the node again, for a store has them
            if attempt == BRINGS_MAX:
                raise
        else:
            return item
    raise AssertionError("unreachable: the last attempt returns or raises")


@contextlib.contextmanager
def _named(row: Mapping[str, Any], instant: _Instant) -> Iterator[None]:
    """Damage says whose it is, and how the rest can be backed up: one rotten file must not keep everything else from it."""
    try:
        yield
    except CorruptSnapshot as error:
        file = error.details.get("file")
        if file is None or file.startswith("images/"):  # without this snapshot the next one would stop at it too
            raise
        name = _name_of(row, instant)
        named = CorruptSnapshot(
            f"Snapshot {row['id']} of {name!r} is damaged, so there is no backup: {error.message}",
            hint="'perdure backup --skip-damaged' saves the rest; 'perdure snapshot verify --all' finds all that are damaged. "
            f"To be rid of it: 'perdure snapshot rm {name} {row['id']}', or, if {name} wakes from it, "
            f"'perdure recover {name} --how rewind'.",
            internal=error.internal,
        )
        named.details = {**error.details, "snapshot_id": row["id"]}
        raise named from error


class _Counting(Uploader):
    """Adds up what it does."""

    def __init__(self, run: _Run) -> None:
        super().__init__(run.tools.remote, run.tools.ledger)
        self._run = run

    async def upload(self, contents: Contents) -> tuple[Item, Moved]:
        item, moved = await super().upload(contents)
        self._run.add(moved)
        return item, moved


async def _local(origin: Origin, snapshot_id: SnapshotId, tenant_id: TenantId) -> Manifest:
    """A snapshot that has its files on this node. Raises CorruptSnapshot, or NotFound when nobody has them."""
    try:
        return origin.store.manifest(snapshot_id)
    except NotFound:
        if origin.bring is None:
            raise CorruptSnapshot(
                f"The files of snapshot {snapshot_id} are missing from this node.", file=f"snapshots/{snapshot_id}/manifest.json"
            ) from None
    await origin.bring(snapshot_id, tenant_id)
    return origin.store.manifest(snapshot_id)


def bases_of(manifest: Manifest) -> Iterator[BaseRef]:
    """Image and goldens that a snapshot lies on. A private base is part of the snapshot."""
    for base in (manifest.disk_base, None if manifest.memory is None else manifest.memory.base):
        if base is not None:
            yield BaseRef(base.image, base.golden)


def _is_here(images: ImageStore, digest: str) -> bool:
    """A workspace that has never been awake may name an image that was removed; then there is nothing to keep of it."""
    try:
        images.load(digest)
    except NotFound:
        return False
    return True


def ram_of(images: ImageStore, base: BaseRef) -> BaseRam:
    """The golden RAM that a reference names. Raises CorruptSnapshot."""
    for golden in images.goldens(images.load(base.image)):
        if golden.ref == base.golden:
            return BaseRam(golden.ram)
    raise CorruptSnapshot(f"The golden snapshot {base.golden} of image {base.image[:12]} is gone.")


def _names(images: ImageStore, digests: set[str]) -> dict[str, str]:
    return {name: digest for name, digest in images.names().items() if digest in digests}


def _wrapped_keys(origin: Origin) -> dict[str, str]:
    return {path.name: base64.b64encode(path.read_bytes()).decode() for path in sorted(origin.keys_dir.glob("*.key"))}


def _check_key(origin: Origin) -> None:
    """Nobody could read what is sealed with a key that is gone."""
    if not origin.sealed:
        return
    try:
        origin.keyring().of(Scope(DEFAULT_TENANT))
    except Shredded as error:
        raise Shredded(
            f"Tenant {DEFAULT_TENANT} was shredded, so no backup can be sealed with its key.",
            hint="Unset PERDURE_STORE_URL and PERDURE_STORE_ENCRYPTION and start the server again: then backups are plain.",
        ) from error


def key_mark(master: bytes) -> str:
    """Tells whether a master key is the same one, and nothing about it."""
    return hashlib.sha256(derive(master, KEY_MARK)).hexdigest()[:32]


def _stored(item: Item) -> StoredItem:
    assert item.checksum is not None, "it is durable"
    return StoredItem(item.key.scope, item.key.name, item.attempt, item.size, item.checksum)


class _Explained:
    """Errors of the place, as such: what the library says of an object store is true of this one."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, NoSpace):
            raise NoSpace(
                f"There is no room left in {self._place.url}; no backup was made.",
                hint="Make room there and run 'perdure backup' again: what was sent is not sent again.",
                internal=error.message,
            ) from error
        if isinstance(error, Unavailable) and "object store" in error.message:
            raise Unavailable(
                f"The backup cannot be written to {self._place.url}: {error.message}",
                hint="Look whether the place can be reached and lets this server in; what was sent is not sent again.",
                internal=error.internal,
            ) from error
