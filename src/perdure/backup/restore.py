"""Bringing a backup back into an empty home.

1. Everything is looked at before anything is written: the backup's manifest, those of its items, and that no chunk is missing.
2. A mark in the home says that a restore goes on; a server does not start while it is there.
3. Images and snapshots are fetched, every chunk checked against its name.
4. The database is loaded in one transaction, and brought to this release's schema.
5. One transaction begins a new life: every workspace sleeps at its last snapshot in a generation that no earlier life can have
   reached, all of them on this node. What the dump said of an object store is dropped, for it says nothing of today's.
6. The mark goes.

Killed at any point, the same restore goes on where it was.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from perdure.backup.make import Progress, Told, key_mark, ram_of
from perdure.backup.place import Place, Tools
from perdure.backup.record import BackupRecord
from perdure.core import files
from perdure.core.config import Settings
from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import Conflict, CorruptData, CorruptSnapshot, HostUnfit, InvalidRequest, NotFound
from perdure.core.ids import DEFAULT_TENANT, NodeId
from perdure.core.keys import KEY_BYTES, master_key
from perdure.db import dump as database_dump
from perdure.db import migrations
from perdure.db.database import Transaction, connect_migrated
from perdure.db.embedded import MAJOR
from perdure.images.moving import ImageMover
from perdure.images.registry import ImageStore
from perdure.journal.entries import canonical
from perdure.snapshots.objects.download import StoredItem
from perdure.snapshots.objects.keys import Keyring, PlainKeyring, TenantKeyring
from perdure.snapshots.objects.local import Mover
from perdure.snapshots.objects.upload import Uploader
from perdure.snapshots.store import SnapshotStore
from perdure.workspaces.facts import RESTORED

MARK = "restore.json"
#: What a home has that is used: such a one is never restored into.
_USED = ("db", "store", "node.id")
_SHOWN_MAX = 5


@dataclass(frozen=True, slots=True)
class Destination:
    """``node_id`` gives this home's node, made when it is asked for."""

    settings: Settings
    images: ImageStore
    node_id: Callable[[], NodeId]


@dataclass(frozen=True, slots=True)
class Restored:
    """``lost``: what could not be brought back although the backup is whole, in sentences. ``set_back``: names of workspaces that
    were not asleep at the backup, and came back at their last snapshot; ``unsaved`` of them had none."""

    record: BackupRecord
    workspaces: int
    set_back: tuple[str, ...]
    unsaved: tuple[str, ...]
    lost: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A backup that is whole as far as a look can tell, and how to read it."""

    record: BackupRecord
    tools: Tools
    items: tuple[StoredItem, ...]  # images first, then snapshots
    dump: StoredItem
    lost: tuple[str, ...]


def check_finished(home: Path) -> None:
    """Raises Conflict while a restore into this home goes on, or was cut off."""
    mark = _read_mark(home)
    if mark is not None:
        raise Conflict(
            f"A restore of the backup {mark['backup']} into {home} has not been finished.",
            hint=f"Run 'perdure restore {mark['place']} --backup {mark['backup']}' again: it goes on where it was.",
        )


# -------------------------------------------------------------------------------------------------------------------- looking


async def prepare(to: Destination, place: Place, backup_id: str | None) -> Prepared:
    """Find the backup and see that it can be restored here. The only thing written is a key that it brings or needs.

    Raises Conflict for a home that is used, NotFound, CorruptData naming what is damaged, or HostUnfit for a release too old.
    """
    home = to.settings.home
    mark = _read_mark(home)
    record = await place.find(backup_id or (mark["backup"] if mark and mark["place"] == place.url else None))
    _check_home(home, place, record, mark)
    _check_release(record)
    lost = _take_keys(to.settings, record)
    tools = place.tools(_keyring(to.settings, record), record.items)
    found, damage = [], []
    for one in record.items:
        try:
            found.append(await tools.downloader.open(one.key))
        except (CorruptSnapshot, NotFound) as error:
            damage.append(error.message)
    if damage:
        more = f" (and {len(damage) - _SHOWN_MAX} more)" if len(damage) > _SHOWN_MAX else ""
        raise CorruptData(
            f"The backup {record.id} is damaged: {' '.join(damage[:_SHOWN_MAX])}{more}",
            hint="Nothing was restored. Try another backup of this place (--backup ID), or bring the missing files back.",
        )
    return Prepared(record, tools, tuple(found[:-1]), found[-1], lost)


def _check_home(home: Path, place: Place, record: BackupRecord, mark: dict[str, str] | None) -> None:
    if mark is not None:
        if (mark["backup"], mark["place"]) != (record.id, place.url):
            check_finished(home)
        return
    for name in _USED:
        path = home / name
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            raise Conflict(
                f"{home} is in use already: it has {name}.",
                hint="Restore into an empty home: set PERDURE_HOME to another directory, or move this one aside.",
            )


def _check_release(record: BackupRecord) -> None:
    if record.schema > migrations.head():
        raise HostUnfit(
            f"The backup {record.id} was made by Perdure {record.release}, whose database schema ({record.schema}) is newer than "
            f"this release knows ({migrations.head()}).",
            hint=f"Restore it with Perdure {record.release} or a newer one.",
        )
    if record.postgres > MAJOR:
        raise HostUnfit(
            f"The backup {record.id} holds a dump of PostgreSQL {record.postgres}; this release brings {MAJOR}.",
            hint="Restore it with a release of Perdure that brings that PostgreSQL.",
        )


def _take_keys(settings: Settings, record: BackupRecord) -> tuple[str, ...]:
    """The master key that the backup brings, or that lies in the home; and the tenants' keys. Returns what is lost without."""
    path = settings.master_key_file
    if record.master_key is not None and not path.exists():
        key = base64.b64decode(record.master_key)
        if len(key) != KEY_BYTES or key_mark(key) != record.key_mark:
            raise CorruptData(f"The master key in the backup {record.id} is damaged.", hint=f"Put the key into {path} yourself.")
        files.make_dir(path.parent)
        files.write_file(path, key, mode=0o600)
    mine = key_mark(master_key(path)) if path.exists() else None
    if mine is not None and record.key_mark is not None and mine != record.key_mark:
        raise InvalidRequest(
            f"The master key {path} is not the one that the backup {record.id} was made with.",
            hint="Put that one in its place; or remove the file to go on without: what it signed or sealed is then lost.",
        )
    if mine is None and record.sealed:
        raise InvalidRequest(
            f"The backup {record.id} is encrypted, and the master key that opens it is not here.",
            hint=f"Put the key into {path} (mode 0600) and run this again. Without it nothing of this backup can be read.",
        )
    for name, wrapped in record.keys.items():
        if "/" in name or name.startswith("."):
            raise CorruptData(f"The backup {record.id} has a key of the name {name!r}, which none can have.")
        _take_wrapped(settings.store_keys_dir / name, base64.b64decode(wrapped))
    if mine is None and record.key_mark is not None:
        return (
            "The backup does not hold the master key, and none is here, so a new one is made: what was sealed with the old one "
            "in an object store cannot be read, and what was signed with it, such as handles in workspaces, is refused.",
        )
    return ()


def _take_wrapped(path: Path, wrapped: bytes) -> None:
    """A tenant's key. One that is here already, and another one, is somebody's."""
    if path.exists() and path.read_bytes() != wrapped:
        raise Conflict(f"{path} is not the key that the backup has.", hint="Move the directory of keys aside and run this again.")
    files.make_dir(path.parent, mode=0o700)
    files.write_file(path, wrapped, mode=0o600)


def _keyring(settings: Settings, record: BackupRecord) -> Keyring:
    if not record.sealed:
        return PlainKeyring()
    return TenantKeyring(settings.store_keys_dir, master_key(settings.master_key_file))


def _read_mark(home: Path) -> dict[str, str] | None:
    try:
        found = json.loads((home / MARK).read_bytes())
        return {"backup": str(found["backup"]), "place": str(found["place"])}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptData(f"{home / MARK} is damaged.", hint="Restore into another, empty home.") from error


# ------------------------------------------------------------------------------------------------------------------ restoring


async def restore(to: Destination, place: Place, ready: Prepared, url: str, told: Told) -> Restored:
    """All of a backup into this home and the empty database at ``url``. Repeat it after any failure."""
    home, record = to.settings.home, ready.record
    if _read_mark(home) is None:
        if not await database_dump.is_empty(url):
            raise Conflict(
                "The database that PERDURE_DATABASE_URL names is not empty.", hint="Name an empty database, or unset it."
            )
        files.make_dir(home)
        files.write_file(home / MARK, json.dumps({"backup": record.id, "place": place.url}).encode() + b"\n")
    crashpoint(CrashPoint.RESTORE_MARKED)
    await _fetch(to, ready, told)
    crashpoint(CrashPoint.RESTORE_FETCHED)
    told(Progress("database", "", 0, 1, 0, 0))
    await _load(to, ready, url)
    crashpoint(CrashPoint.RESTORE_LOADED)
    rows = await _settle(to.node_id(), record, url)
    crashpoint(CrashPoint.RESTORE_SETTLED)
    await asyncio.to_thread(files.remove, home / MARK)
    told(Progress("database", "", 1, 1, 0, 0))
    return Restored(record, rows.workspaces, rows.set_back, rows.unsaved, ready.lost)


async def _fetch(to: Destination, ready: Prepared, told: Told) -> None:
    record, tools = ready.record, ready.tools
    images, snapshots = ready.items[: len(record.images)], ready.items[len(record.images) :]
    uploader = Uploader(tools.remote, tools.ledger)
    movers = ImageMover(to.images, uploader, tools.downloader)
    for done, item in enumerate(images):
        told(Progress("images", item.manifest.key.name, done, len(images), 0, 0))
        await _whole(to, movers, item)
    await asyncio.to_thread(_name_images, to.images, record.names)
    store = SnapshotStore(to.settings.store)
    with ExitStack() as stack:
        await asyncio.to_thread(store.open)
        stack.callback(store.close)
        mover = Mover(store, uploader, tools.downloader, lambda base: ram_of(to.images, base))
        for done, item in enumerate(snapshots):
            told(Progress("snapshots", item.manifest.key.name, done, len(snapshots), 0, 0))
            try:
                await mover.adopt(item)
            except CorruptSnapshot as error:
                raise CorruptSnapshot(
                    f"Snapshot {item.manifest.key.name} of the backup {record.id} cannot be restored: {error.message}",
                    hint="Nothing was started. Bring the damaged file back, or restore another backup (--backup ID).",
                    file=error.file,
                ) from error
    told(Progress("snapshots", "", len(snapshots), len(snapshots), 0, 0))


async def _whole(to: Destination, mover: ImageMover, item: StoredItem) -> None:
    """An image and its golden. Raises CorruptData when the image directory has a damaged one in its place."""
    base = await mover.adopt(item)
    if not await asyncio.to_thread(mover.has, base):
        raise CorruptData(
            f"The image {base.image[:12]} in {to.images.root} is damaged: its golden snapshot {base.golden} cannot be used.",
            hint="Remove that image there, or set PERDURE_IMAGE_DIR to an empty directory, and run this again.",
        )


def _name_images(images: ImageStore, names: dict[str, str]) -> None:
    """Names that are free here. One that somebody has given to a newer image stays that one's."""
    known = images.names()
    for name, digest in names.items():
        if name not in known:
            files.make_dir(images.root / "names")
            files.write_file(images.root / "names" / name, f"{digest}\n".encode())


async def _load(to: Destination, ready: Prepared, url: str) -> None:
    """Once: the load is one transaction, so a database that is not empty by now has all of it."""
    if not await database_dump.is_empty(url):
        return
    path = to.settings.run_dir / f"{files.TEMPORARY}database.dump"
    files.make_dir(path.parent, mode=0o700)
    files.remove(path)
    try:
        await ready.tools.downloader.fetch_file(ready.dump, "database.dump", path)
        await database_dump.load(url, path)
    finally:
        files.remove(path)


@dataclass(frozen=True, slots=True)
class _Settled:
    workspaces: int
    set_back: tuple[str, ...]
    unsaved: tuple[str, ...]


async def _settle(node_id: NodeId, record: BackupRecord, url: str) -> _Settled:
    """Begin the new life. Repeating it begins another one, which does no harm."""
    database = await connect_migrated(url)
    try:
        async with database.transaction() as tx:
            return await _new_life(tx, node_id, record)
    finally:
        await database.close()


async def _new_life(tx: Transaction, node_id: NodeId, record: BackupRecord) -> _Settled:
    before = {row["id"]: row for row in await tx.all("backup.workspaces")}
    await tx.run("backup.nodes_down")
    await tx.one("nodes.register", id=node_id, tenant_id=DEFAULT_TENANT, lease_s=0.0)
    for statement in ("let_go_all", "forget_strays", "forget_holds", "forget_packs", "forget_needs", "forget_items"):
        await tx.run(f"backup.{statement}")
    await tx.run("backup.new_installation")
    unfinished = [row["id"] for row in await tx.all("backup.unfinished")]
    await tx.run("retention.drop", ids=unfinished)
    await tx.run("backup.moved_snapshots", node_id=node_id)
    what = f"{RESTORED} {record.id} of {record.created_at.strftime('%Y-%m-%d %H:%M:%S')} UTC"
    body = {"event": "restored", "backup": record.id, "of": record.created_at.isoformat()}
    detail = f"{what[0].upper()}{what[1:]}."
    unborn = {"detail": "Its creation was not finished when it was backed up.", "body": canonical({**body, "to": "deleted"})}
    await tx.all("backup.unborn", node_id=node_id, **unborn)
    rows = await tx.all(
        "backup.asleep",
        **{"node_id": node_id, "detail": detail, "body": canonical(body), "rewound": what},
    )
    await tx.run("backup.moved_deleted", node_id=node_id)
    back = [row for row in rows if before[row["id"]]["state"] not in ("hibernated", "failed")]
    return _Settled(
        len(rows),
        tuple(row["name"] for row in back),
        tuple(row["name"] for row in back if row["head_snapshot_id"] is None),
    )
