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
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perdure.backup.make import Progress, Told, bases_of, key_mark, ram_of
from perdure.backup.place import Place, Tools
from perdure.backup.record import BackupRecord, LeftOut
from perdure.core import files
from perdure.core.config import Settings
from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import Conflict, CorruptData, CorruptSnapshot, HostUnfit, InvalidRequest, NotFound, Shredded
from perdure.core.ids import DEFAULT_TENANT, NodeId
from perdure.core.keys import KEY_BYTES, master_key
from perdure.db import dump as database_dump
from perdure.db import migrations
from perdure.db.database import Transaction, connect_migrated
from perdure.db.embedded import MAJOR
from perdure.images.moving import ImageMover
from perdure.images.registry import ImageStore
from perdure.journal.entries import canonical
from perdure.snapshots.manifest import BaseRef
from perdure.snapshots.objects.download import StoredItem
from perdure.snapshots.objects.keys import GONE, Keyring, PlainKeyring, TenantKeyring
from perdure.snapshots.objects.local import DISK_ONLY, Mover, image_key, snapshot_of
from perdure.snapshots.objects.upload import Uploader
from perdure.snapshots.store import SnapshotStore
from perdure.wire.objects import ItemKey
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
    """``snapshots`` are here, some perhaps without their memory. ``lost``: what could not be brought back, or not whole, in
    sentences. ``set_back``: names of workspaces that were not asleep at the backup, and came back at their last snapshot;
    ``unsaved`` of them had none. ``skipped``: snapshots that are damaged in the place."""

    record: BackupRecord
    workspaces: int
    snapshots: int
    set_back: tuple[str, ...]
    unsaved: tuple[str, ...]
    lost: tuple[str, ...]
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A backup that is whole as far as a look can tell, and how to read it. ``damage``: where what is damaged is skipped, that,
    by the keys of items."""

    record: BackupRecord
    tools: Tools
    images: tuple[StoredItem, ...]
    snapshots: tuple[StoredItem, ...]
    dump: StoredItem
    lost: tuple[str, ...]
    skip_damaged: bool = False
    damage: dict[ItemKey, str] = field(default_factory=dict)


def check_finished(home: Path) -> None:
    """Raises Conflict while a restore into this home goes on, or was cut off."""
    mark = _read_mark(home)
    if mark is not None:
        raise Conflict(
            f"A restore of the backup {mark['backup']} into {home} has not been finished.",
            hint=f"Run 'perdure restore {mark['place']} --backup {mark['backup']}' again: it goes on where it was.",
        )


# -------------------------------------------------------------------------------------------------------------------- looking


async def prepare(to: Destination, place: Place, backup_id: str | None, *, skip_damaged: bool = False) -> Prepared:
    """Find the backup and see that it can be restored here. The only thing written is a key that it brings or needs.

    Raises Conflict for a home that is used, NotFound, CorruptData naming what is damaged, or HostUnfit for a release too old.
    ``skip_damaged``: without what is damaged of images and snapshots.
    """
    home = to.settings.home
    mark = _read_mark(home)
    record = await place.find(backup_id or (mark["backup"] if mark and mark["place"] == place.url else None))
    _check_home(home, place, record, mark)
    _check_release(record)
    lost = _take_keys(to.settings, record)
    tools = place.tools(_keyring(to.settings, record), record.items)
    found, damage = dict[ItemKey, StoredItem](), dict[ItemKey, str]()
    for one in record.items:
        try:
            found[one.key] = await tools.downloader.open(one.key)
        except (CorruptSnapshot, NotFound) as error:
            damage[one.key] = error.message
    if damage and (not skip_damaged or record.dump.key in damage):
        raise _damaged(record, list(damage.values()), way_on=record.dump.key not in damage)
    images = tuple(found[one.key] for one in record.images if one.key in found)
    snapshots = tuple(found[one.key] for one in record.snapshots if one.key in found)
    return Prepared(record, tools, images, snapshots, found[record.dump.key], lost, skip_damaged, damage)


def _damaged(record: BackupRecord, damage: list[str], *, way_on: bool) -> CorruptData:
    more = f" (and {len(damage) - _SHOWN_MAX} more)" if len(damage) > _SHOWN_MAX else ""
    rest = " '--skip-damaged' restores the rest." if way_on else " Its database is, so there is nothing to restore without it."
    return CorruptData(
        f"The backup {record.id} is damaged: {' '.join(damage[:_SHOWN_MAX])}{more}",
        hint=f"Nothing was restored. Try another backup of this place (--backup ID), or bring the missing files back.{rest}",
    )


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
        _take_wrapped(settings.store_keys_dir / name, base64.b64decode(wrapped))
    if mine is None and record.key_mark is not None:
        return (
            "The backup does not hold the master key, and none is here, so a new one is made: what was sealed with the old one "
            "in an object store cannot be read, and what was signed with it, such as handles in workspaces, is refused.",
        )
    return ()


def _take_wrapped(path: Path, wrapped: bytes) -> None:
    """A tenant's key. One that is here already, and another one, is somebody's."""
    if path.exists() and path.read_bytes() == GONE:
        raise Shredded(
            f"The backup holds the key of a tenant that was shredded here: {path} says so.",
            hint="Restore a backup that was made after that; nothing of this one that the key seals should come back.",
        )
    if path.exists() and path.read_bytes() != wrapped:
        raise Conflict(f"{path} is not the key that the backup has.", hint="Move the directory of keys aside and run this again.")
    files.make_dir(path.parent, mode=0o700)
    files.write_file(path, wrapped, mode=0o600)


def _keyring(settings: Settings, record: BackupRecord) -> Keyring:
    if not record.sealed:
        return PlainKeyring()
    return TenantKeyring(settings.store_keys_dir, master_key(settings.master_key_file, settings.store_keys_dir))


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
    skipped = await _fetch(to, ready, told)
    crashpoint(CrashPoint.RESTORE_FETCHED)
    told(Progress("database", "", 0, 1, 0, 0))
    await _load(to, ready, url)
    crashpoint(CrashPoint.RESTORE_LOADED)
    rows = await _settle(to.node_id(), record, url, skipped)
    crashpoint(CrashPoint.RESTORE_SETTLED)
    await asyncio.to_thread(files.remove, home / MARK)
    told(Progress("database", "", 1, 1, 0, 0))
    lost = (*ready.lost, *map(_sentence, rows.left_out))
    snapshots = len(record.snapshots) - sum(not one.has_disk for one in skipped.values())
    return Restored(record, rows.workspaces, snapshots, rows.set_back, rows.unsaved, lost, tuple(skipped))


#: Snapshots that are damaged in the place, by their ids. Whose they are is known when the database is there.
Skipped = dict[str, LeftOut]


async def _fetch(to: Destination, ready: Prepared, told: Told) -> Skipped:
    """Returns what could not be fetched, where that is skipped."""
    record, tools, damage = ready.record, ready.tools, dict(ready.damage)
    images, snapshots = ready.images, ready.snapshots
    uploader = Uploader(tools.remote, tools.ledger)
    movers = ImageMover(to.images, uploader, tools.downloader)
    for done, item in enumerate(images):
        told(Progress("images", item.manifest.key.name, done, len(images), 0, 0))
        try:
            await _whole(to, movers, item)
        except CorruptSnapshot as error:
            if not ready.skip_damaged:
                raise
            damage[item.manifest.key] = error.message
    await asyncio.to_thread(_name_images, to.images, record.names)
    gone = {one.name.removesuffix(DISK_ONLY): damage[one.key] for one in record.snapshots if one.key in damage}
    skipped = {name: LeftOut(name, "", why) for name, why in gone.items()}
    store = SnapshotStore(to.settings.store)
    with ExitStack() as stack:
        await asyncio.to_thread(store.open)
        stack.callback(store.close)
        mover = Mover(store, uploader, tools.downloader, lambda base: ram_of(to.images, base))
        for done, item in enumerate(snapshots):
            told(Progress("snapshots", item.manifest.key.name, done, len(snapshots), 0, 0))
            await _adopt(ready, mover, item, damage, skipped)
    told(Progress("snapshots", "", len(snapshots), len(snapshots), 0, 0))
    return skipped


async def _adopt(ready: Prepared, mover: Mover, item: StoredItem, damage: dict[ItemKey, str], skipped: Skipped) -> None:
    """A snapshot; or, where what is damaged is skipped, what of it can be read: its disk, or nothing."""
    told = snapshot_of(item)
    below = [why for base in bases_of(told) if (why := damage.get(image_key(base))) is not None]
    try:
        if below:
            raise CorruptSnapshot(f"What it lies on is damaged: {below[0]}")
        await mover.adopt(item)
    except CorruptSnapshot as error:
        if not ready.skip_damaged:
            raise CorruptSnapshot(
                f"Snapshot {told.snapshot_id} of the backup {ready.record.id} cannot be restored: {error.message}",
                hint="Nothing was started. Bring the damaged file back, restore another backup (--backup ID), or go on without "
                "what is damaged (--skip-damaged).",
                file=error.file,
            ) from error
        skipped[told.snapshot_id] = LeftOut(told.snapshot_id, "", error.message)
        if told.memory is None or image_key(BaseRef(told.disk_base.image, told.disk_base.golden)) in damage:
            return
        with suppress(CorruptSnapshot):
            await mover.adopt(item, disk_only=True)
            skipped[told.snapshot_id] = replace(skipped[told.snapshot_id], has_disk=True)


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
    left_out: tuple[LeftOut, ...] = ()


async def _settle(node_id: NodeId, record: BackupRecord, url: str, skipped: Skipped) -> _Settled:
    """Begin the new life. Repeating it begins another one, which does no harm."""
    database = await connect_migrated(url)
    try:
        async with database.transaction() as tx:
            return await _new_life(tx, node_id, record, skipped)
    finally:
        await database.close()


async def _new_life(tx: Transaction, node_id: NodeId, record: BackupRecord, skipped: Skipped) -> _Settled:
    before = {row["id"]: row for row in await tx.all("backup.workspaces")}
    await tx.run("backup.nodes_down")
    await tx.one("nodes.register", id=node_id, tenant_id=DEFAULT_TENANT, lease_s=0.0)
    for statement in (
        "let_go_all",
        "forget_strays",
        "forget_holds",
        "forget_packs",
        "forget_needs",
        "forget_items",
        "forget_keys",
        "forget_shreds",
    ):
        await tx.run(f"backup.{statement}")
    await tx.run("backup.new_installation")
    left_out = await _left_out(tx, record, skipped, before)
    await _without(tx, left_out)
    unfinished = [row["id"] for row in await tx.all("backup.unfinished")]
    await tx.run("retention.drop", ids=unfinished)
    await tx.run("backup.moved_snapshots", node_id=node_id)
    what = f"{RESTORED} {record.id} of {record.created_at.strftime('%Y-%m-%d %H:%M:%S')} UTC"
    of = record.created_at.isoformat()
    body = {"event": "restored", "backup": record.id, "of": of, "alive_until": of}  # what came after is another life's
    detail = f"{what[0].upper()}{what[1:]}."
    unborn = {"detail": "Its creation was not finished when it was backed up.", "body": canonical({**body, "to": "deleted"})}
    await tx.all("backup.unborn", node_id=node_id, **unborn)
    rows = await tx.all(
        "backup.asleep",
        **{"node_id": node_id, "detail": detail, "body": canonical(body), "rewound": what},
    )
    await _tell_fallen(tx, left_out, {row["id"]: row["head_snapshot_id"] for row in rows}, what)
    await tx.run("backup.moved_deleted", node_id=node_id)
    fallen = {workspace_id for one in left_out for workspace_id in one.heads}
    back = [row for row in rows if before[row["id"]]["state"] not in ("hibernated", "failed")]
    return _Settled(
        len(rows),
        tuple(row["name"] for row in back),
        tuple(row["name"] for row in back if row["head_snapshot_id"] is None and row["id"] not in fallen),
        tuple(left_out),
    )


async def _left_out(tx: Transaction, record: BackupRecord, skipped: Skipped, before: Mapping[str, Any]) -> list[LeftOut]:
    """What the backup was made without, and what is damaged in it, with whose it is."""
    known = {one.snapshot_id: one for one in record.left_out}
    owners = {row["id"]: row["workspace_id"] for row in await tx.all("backup.snapshots")}
    for name, one in skipped.items():
        made_without = known.get(name)  # its memory was damaged then, and its disk is now
        if made_without is not None:
            known[name] = replace(made_without, has_disk=False)
            continue
        owner = owners.get(name, "")
        heads = tuple(workspace_id for workspace_id, row in before.items() if row["head_snapshot_id"] == name)
        known[name] = replace(one, workspace=before[owner]["name"] if owner in before else owner, heads=heads)
    unborn = [one for one in record.left_out if one.snapshot_id is None]
    return [*(one for name, one in known.items() if name is not None), *unborn]


async def _without(tx: Transaction, left_out: list[LeftOut]) -> None:
    """The catalogue names nothing that is not here."""
    gone = [one.snapshot_id for one in left_out if one.snapshot_id is not None and not one.has_disk]
    await tx.run("backup.fall_back", ids=gone)
    await tx.all("retention.mark", ids=gone)
    await tx.run("backup.without_memory", ids=[one.snapshot_id for one in left_out if one.has_disk])


async def _tell_fallen(tx: Transaction, left_out: list[LeftOut], heads: dict[str, str | None], what: str) -> None:
    """Workspaces whose last snapshot is not, or not whole, in the backup have it in their thread, and in their next report."""
    for one in left_out:
        for workspace_id in one.heads:
            if workspace_id not in heads:  # its creation was not finished
                continue
            head = heads[workspace_id]
            rewound = f"{what}, {_fallen(one, head)}"
            body = canonical({"event": "left-out", "snapshot_id": one.snapshot_id, "head": head, "why": one.why})
            detail = f"{rewound[0].upper()}{rewound[1:]}."
            await tx.one("backup.fallen", id=workspace_id, rewound=rewound, detail=detail, body=body)


def _fallen(one: LeftOut, head: str | None) -> str:
    if one.has_disk:
        return f"which has only the disk of its last snapshot {one.snapshot_id}: the memory was damaged"
    way = f"this is {head}" if head is not None else "it has no other, and begins anew"
    return f"which does not have its last snapshot {one.snapshot_id}: it was damaged; {way}"


def _sentence(one: LeftOut) -> str:
    if one.snapshot_id is None:
        return f"{one.workspace!r} had no snapshot, and its image is not in the backup: {one.why}"
    what = "came back without its memory" if one.has_disk else "is not in the backup"
    return f"Snapshot {one.snapshot_id} of {one.workspace!r} {what}: {one.why}"
