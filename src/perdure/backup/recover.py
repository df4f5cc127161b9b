"""A catalogue without its database: workspaces, snapshots and the store's own rows, made of what the object store holds.

The store is read, and one transaction writes everything; before it, the store is taken over, so that a garbage collection of the
installation that is gone could not work against it. Nothing is fetched: a workspace's wake does that. Killed at any point, run
it again.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from psycopg.types.json import Jsonb

from perdure.backup.catalogue import Catalogue, Defaults, Found, catalogue
from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import Conflict, CorruptSnapshot, NotFound, PerdureError
from perdure.core.ids import DEFAULT_TENANT, NodeId, is_id
from perdure.db.database import Database, Transaction
from perdure.journal.entries import canonical
from perdure.snapshots.manifest import Manifest
from perdure.snapshots.objects.download import Downloader, StoredItem, Survey
from perdure.snapshots.objects.local import snapshot_key, snapshot_of
from perdure.snapshots.objects.manifest import ItemManifest
from perdure.snapshots.objects.remote import Remote, manifest_name
from perdure.wire.objects import IMAGES, Pack, PackId, Rows, Scope
from perdure.workspaces.facts import FACT, RECOVERED

#: What a recovery leaves out has no rows: to the garbage collection it is strays. Where there is any, none takes place for so
#: long: somebody may bring back what is missing, and recover once more.
KEPT = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Recovered:
    """``only_here``: how many of the snapshots this node has and the store has not. ``incomplete``: items of which parts are
    missing. ``damaged``: what cannot be read, and why. ``kept_until``: when what was left out becomes due for collection; None
    when nothing was."""

    workspaces: tuple[str, ...]
    snapshots: int
    only_here: int
    nameless: tuple[str, ...]
    incomplete: tuple[str, ...]
    damaged: dict[str, str]
    kept_until: datetime | None


@dataclass(frozen=True, slots=True)
class Here:
    """What a node has by itself. ``damaged``: manifests that cannot be read, by name, and why."""

    manifests: tuple[Manifest, ...] = ()
    damaged: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Into:
    """Where a catalogue is made: a database that has the schema and nothing else. Of what is ``here``, on this node, the next
    start would remove what has no row."""

    database: Database
    node_id: Callable[[], NodeId]
    defaults: Defaults
    here: Here = field(default_factory=Here)


@dataclass(slots=True)
class _Scope:
    """What the store has of a tenant or of the images. ``rows``: attempt, size and checksum of each item's manifest."""

    scope: Scope
    items: dict[str, StoredItem] = field(default_factory=dict)
    rows: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    packs: dict[PackId, Pack] = field(default_factory=dict)
    attempts: int = 0


@dataclass(slots=True)
class _Read:
    """What was found in a store. ``lossy`` are scopes of which something is left out."""

    scopes: list[_Scope] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    incomplete: dict[str, ItemManifest] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    lossy: list[Scope] = field(default_factory=list)


async def recover(remote: Remote, rows: Rows, into: Into, told: Callable[[str], None]) -> Recovered:
    """Raises Conflict when the database is in use, NotFound for a store without anything of ours, or Unavailable."""
    database = into.database
    await _check_empty(database)
    read = await _read(remote, rows, told)
    if not read.scopes and not read.damaged:
        raise NotFound("The object store holds nothing of an installation.", hint="Check PERDURE_STORE_URL.")
    only_here = _add_here(read, into.here)
    made = catalogue(read.found, into.defaults)
    installation = await database.one("catalogue.installation")
    assert installation is not None, "the schema has made one"
    await remote.claim(installation["id"], take=True)
    crashpoint(CrashPoint.RECOVER_CLAIMED)
    node = into.node_id()
    async with database.transaction() as tx:
        await _check_empty(tx)
        await tx.one("nodes.register", id=node, tenant_id=DEFAULT_TENANT, lease_s=0.0)
        await _write(tx, node, made)
        for one in read.scopes:
            await _write_scope(tx, one)
        await _write_needs(tx, read.scopes)
        kept_until = await _keep(tx, read.lossy if read.incomplete or read.damaged else [])
    crashpoint(CrashPoint.RECOVER_COMMITTED)
    names = tuple(row["name"] for row in made.workspaces)
    left_out = (tuple(read.incomplete), read.damaged, kept_until)
    return Recovered(names, len(made.snapshots), only_here, tuple(made.nameless), *left_out)


async def _read(remote: Remote, rows: Rows, told: Callable[[str], None]) -> _Read:
    read = _Read()
    for scope in await _scopes(remote):
        told(scope)
        try:
            survey = await Downloader(remote, rows).survey(scope)
        except PerdureError as error:  # the tenant's key is missing or shredded: the others are not worse for it
            read.damaged[scope] = error.message
            read.lossy.append(scope)
            continue
        damaged = dict(survey.damaged)
        read.scopes.append(await _rows(remote, scope, survey, damaged))
        read.found += [] if scope == IMAGES else _snapshots(survey, damaged)
        read.damaged |= damaged
        read.incomplete |= {str(manifest.key): manifest for manifest in survey.incomplete}
        if damaged or survey.incomplete:
            read.lossy.append(scope)
    return read


async def _keep(tx: Transaction, lossy: list[Scope]) -> datetime | None:
    """Of those scopes nothing is collected for a while. Of images neither: what is left out lies on some, and no row says so."""
    kept_until = None
    for scope in sorted({*lossy, IMAGES}) if lossy else ():
        tenant = DEFAULT_TENANT if scope == IMAGES else scope
        row = await tx.one("catalogue.keep_scope", scope=scope, tenant_id=tenant, keep_s=KEPT.total_seconds())
        assert row is not None, "an insert or an update"
        kept_until = row["collect_after"]
    return kept_until


async def _check_empty(database: Database | Transaction) -> None:
    row = await database.one("catalogue.is_empty")
    if row is None or not row["is_empty"]:
        raise Conflict(
            "The database is not empty: it has workspaces or snapshots already.",
            hint="Recover into an empty home (PERDURE_HOME), or an empty database (PERDURE_DATABASE_URL).",
        )


def _add_here(read: _Read, here: Here) -> int:
    """Snapshots of this node that the store lacks: the newest for the most part, not uploaded yet. Returns how many."""
    stored = {one.manifest.snapshot_id for one in read.found}
    more = [manifest for manifest in here.manifests if manifest.snapshot_id not in stored]
    for manifest in more:
        begun = read.incomplete.pop(str(snapshot_key(manifest)), None)  # it is uploaded anew
        read.found.append(Found(manifest, {} if begun is None else _facts(begun)))
    read.damaged |= {name: why for name, why in here.damaged.items() if name.rpartition("/")[2] not in stored}
    return len(more)


async def _scopes(remote: Remote) -> list[Scope]:
    """The tenants of which something is there, and the images."""
    seen = {name.partition("/")[0] async for name, _ in remote.objects.list("")}
    return [Scope(name) for name in sorted(seen) if name == IMAGES or is_id(name, "ten")]


async def _rows(remote: Remote, scope: Scope, survey: Survey, damaged: dict[str, str]) -> _Scope:
    made = _Scope(scope)
    sizes, manifests = await remote.listed(scope)
    made.attempts = max((attempt for _, attempt in manifests), default=0)
    for item in survey.items:
        key, attempt = item.manifest.key, item.manifest.attempt
        data = await remote.objects.get(manifest_name(key, attempt))
        made.items[key.name] = item
        made.rows[key.name] = (attempt, len(data), hashlib.sha256(data).hexdigest())
    for pack_id, size in sizes.items():
        try:
            made.packs[pack_id] = await remote.pack_facts(scope, pack_id, size)
        except (CorruptSnapshot, NotFound) as error:
            damaged.setdefault(f"{scope}/packs/{pack_id}", error.message)
    return made


def _snapshots(survey: Survey, damaged: dict[str, str]) -> list[Found]:
    found = []
    for item in survey.items:
        try:
            found.append(Found(snapshot_of(item), _facts(item.manifest)))
        except CorruptSnapshot as error:
            damaged[str(item.manifest.key)] = error.message
    return found


def _facts(manifest: ItemManifest) -> dict[str, Any]:
    facts = manifest.facts.get(FACT)
    return facts if isinstance(facts, dict) else {}


async def _write(tx: Transaction, node: NodeId, made: Catalogue) -> None:
    for row in made.workspaces:
        body = canonical({"event": "recovered", "name": row["name"], "head": row["head_snapshot_id"]})
        values: dict[str, Any] = {**row, "environment": Jsonb(row["environment"]), "metadata": Jsonb(row["metadata"])}
        detail = f"{RECOVERED[0].upper()}{RECOVERED[1:]}."
        await tx.one("catalogue.add_workspace", **values, node_id=node, body=body, detail=detail, rewound=RECOVERED)
    for child, parent in made.parents.items():
        await tx.run("catalogue.set_parent", id=child, parent_id=parent)
    for row in made.snapshots:
        await tx.run("catalogue.add_snapshot", **row, node_id=node)


async def _write_scope(tx: Transaction, made: _Scope) -> None:
    tenant = DEFAULT_TENANT if made.scope == IMAGES else made.scope
    common = {"scope": made.scope, "tenant_id": tenant}
    await tx.run("tenants.adopt", id=tenant)
    await tx.run("catalogue.add_scope", **common, attempts=made.attempts)
    for pack in made.packs.values():
        await tx.run("catalogue.add_pack", **common, id=pack.pack_id, size=pack.size, index_bytes=pack.index_bytes)
    holds: defaultdict[str, set[PackId]] = defaultdict(set)
    for name, item in made.items.items():
        attempt, size, checksum = made.rows[name]
        await tx.run("catalogue.add_item", **common, name=name, attempt=attempt, size=size, checksum=checksum)
        holds[name] |= {place.pack_id for place in item.places.values()}
    for name, packs in holds.items():
        for pack_id in sorted(packs & made.packs.keys()):
            await tx.run("catalogue.add_hold", **common, name=name, pack_id=pack_id)


async def _write_needs(tx: Transaction, scopes: list[_Scope]) -> None:
    """When all items are there, of those that are."""
    known = {item.manifest.key for one in scopes for item in one.items.values()}
    for one in scopes:
        tenant = DEFAULT_TENANT if one.scope == IMAGES else one.scope
        for item in one.items.values():
            for need in sorted(set(item.manifest.needs) & known):
                names = {"scope": one.scope, "name": item.manifest.key.name, "tenant_id": tenant}
                await tx.run("catalogue.add_need", **names, need_scope=need.scope, need_name=need.name)
