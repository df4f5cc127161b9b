"""The node's half of the object store: implements ``wire.node.SecondHome`` over the snapshot store and the image directory.

Uploads give way: while a workspace is being started they stand still, so that no wake competes with them for the processor.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import structlog

from perdure.core.errors import CorruptSnapshot, NotFound, Shredded
from perdure.core.ids import SnapshotId, TenantId
from perdure.snapshots.manifest import BaseRef, Manifest
from perdure.snapshots.objects.collect import Collector, Rewritten, durable
from perdure.snapshots.objects.download import Downloader, StoredItem
from perdure.snapshots.objects.local import Bases, Mover, image_key, snapshot_of
from perdure.snapshots.objects.remote import Remote
from perdure.snapshots.objects.upload import PACK_BYTES, Moved, Uploader
from perdure.snapshots.store import SnapshotStore
from perdure.wire.node import Damage, Fetched, Fetching, Reclaimed, Sent
from perdure.wire.objects import IMAGES, Catalogue, Item, ItemKey, ItemState, Scope

#: An upload stands still for so long at most, however many workspaces are started one after the other.
STANDSTILL_S = 20.0

HERE = Fetched(is_fetched=False)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ObjectParts:
    """A store and the rows that say what it holds. ``owner`` is this installation."""

    remote: Remote
    catalogue: Catalogue
    owner: str
    pack_bytes: int = PACK_BYTES


class Images(Protocol):
    """What lies below snapshots: ``images.moving.ImageMover``."""

    async def upload(self, base: BaseRef) -> tuple[Item, Moved]: ...

    async def adopt(self, item: StoredItem) -> BaseRef: ...

    def has(self, base: BaseRef) -> bool: ...

    def holds(self, base: BaseRef, file: str) -> bool: ...

    async def renew(self, item: StoredItem, file: str) -> None: ...


ImagesOf = Callable[[Uploader, Downloader], Images]


class Starts:
    """How many workspaces are being started, and from which snapshots."""

    def __init__(self) -> None:
        self._sources: Counter[SnapshotId | None] = Counter()
        self._none = asyncio.Event()
        self._none.set()
        self.quiet = threading.Event()  # the same, for threads
        self.quiet.set()

    @contextmanager
    def one(self, source: SnapshotId | None) -> Iterator[None]:
        self._sources[source] += 1
        self._none.clear()
        self.quiet.clear()
        try:
            yield
        finally:
            self._sources[source] -= 1
            self._sources += Counter()  # drops what is zero
            if not self._sources:
                self._none.set()
                self.quiet.set()

    def reads(self, snapshot_id: SnapshotId) -> bool:
        return self._sources[snapshot_id] > 0

    async def over(self) -> None:
        """Returns when there are none, or after a while all the same."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STANDSTILL_S):
                await self._none.wait()


class NodeSecondHome:
    """Implements ``wire.node.SecondHome``. ``renewed`` hears of an image, by its digest, of which a file is another one now."""

    def __init__(
        self,
        parts: ObjectParts,
        store: SnapshotStore,
        images: ImagesOf,
        bases: Bases,
        starts: Starts,
        renewed: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._renewed = renewed
        self._parts = parts
        self._store = store
        self._images_of = images
        self._bases = bases
        self._starts = starts
        self._downloader = Downloader(parts.remote, parts.catalogue)
        uploader = Uploader(parts.remote, parts.catalogue)
        self._images = images(uploader, self._downloader)  # these two only fetch
        self._mover = Mover(store, uploader, self._downloader, bases)
        self._collector = Collector(parts.remote, parts.catalogue, parts.owner, pack_bytes=parts.pack_bytes)
        self._known: set[BaseRef] = set()  # images that were seen to be here
        self._evicting: dict[SnapshotId, asyncio.Task[int]] = {}
        self._fetching: dict[SnapshotId, asyncio.Task[Fetched]] = {}
        self._coming: dict[SnapshotId, Fetching] = {}
        self._sending_images = asyncio.Lock()

    async def close(self) -> None:
        """Cut off fetches that nobody waits for any more."""
        for task in list(self._fetching.values()):
            task.cancel()
        await asyncio.gather(*self._fetching.values(), *self._evicting.values(), return_exceptions=True)

    @property
    def seals(self) -> bool:
        return self._parts.remote.keyring.seals

    async def claim(self) -> None:
        # Looked at each time: a recovery elsewhere takes the store over while we live. Every snapshot lies on an image, which is
        # durable before it and for longer.
        await self._parts.remote.claim(self._parts.owner, known=await durable(self._parts.catalogue, IMAGES))

    # ------------------------------------------------------------------------------------------------------------ to the store

    async def upload(self, snapshot_id: SnapshotId, facts: Mapping[str, Any], told: Callable[[Sent], None]) -> Sent:
        await self.claim()
        sent = _Sum(told)

        async def watch(moved: Moved) -> None:
            sent.now(moved)
            await self._starts.over()

        manifest = self._store.manifest(snapshot_id)
        remote, catalogue, pack_bytes = self._parts.remote, self._parts.catalogue, self._parts.pack_bytes
        uploader = Uploader(remote, catalogue, pack_bytes=pack_bytes, watch=watch)
        images, refs = self._images_of(uploader, self._downloader), _images_of(manifest)
        for ref in refs:
            if not await self._is_stored(image_key(ref)):
                await self._send_image(images, ref)
                sent.next()
        mover = Mover(self._store, uploader, self._downloader, self._bases)
        _, moved = await mover.upload(snapshot_id, sorted(map(image_key, refs)), facts)
        return sent.now(moved)

    async def _send_image(self, images: Images, ref: BaseRef) -> None:
        """The first snapshots of an image go at once, and all need it: a second attempt would take over from the first, which
        then fails, and send gigabytes once more. Who comes later, here or on another node, waits, and goes on with it when the
        first has failed."""
        key = image_key(ref)
        async with self._sending_images, self._parts.catalogue.alone(key):
            if not await self._is_stored(key):
                await images.upload(ref)

    async def _is_stored(self, key: ItemKey) -> bool:
        try:
            return (await self._parts.catalogue.item(key)).state is ItemState.DURABLE
        except NotFound:
            return False

    # ---------------------------------------------------------------------------------------------------------- from the store

    def has(self, snapshot_id: SnapshotId) -> bool:
        refs = self._refs_here(snapshot_id)
        return refs is not None and refs <= self._known and snapshot_id not in self._evicting

    async def fetch(self, snapshot_id: SnapshotId, tenant_id: TenantId, *, afresh: bool = False) -> Fetched:
        if snapshot_id in self._evicting:
            await asyncio.wait([self._evicting[snapshot_id]])
        if not afresh and await self._is_here(snapshot_id):
            return HERE
        # Siblings that start from one snapshot find the same damage: what the first has fetched is not thrown away by the second.
        task = self._fetching.get(snapshot_id)
        if task is None:
            work = self._fetch(snapshot_id, tenant_id, afresh=afresh)
            task = self._fetching[snapshot_id] = asyncio.create_task(work, name=f"fetch-{snapshot_id}")
            task.add_done_callback(lambda _: self._fetching.pop(snapshot_id, None))
        return await asyncio.shield(task)

    async def _fetch(self, snapshot_id: SnapshotId, tenant_id: TenantId, *, afresh: bool) -> Fetched:
        key = ItemKey(Scope(tenant_id), snapshot_id)
        item = await self._downloader.open(key)
        refs = _images_of(snapshot_of(item))
        absent = [ref for ref in refs if not await asyncio.to_thread(self._images.has, ref)]
        images = [await self._downloader.open(image_key(ref)) for ref in absent]
        with self._progress(snapshot_id, (*images, item)) as heard:
            for image in images:
                await self._images.adopt(replace(image, heard=heard))
            # Never by deleting first: what is here may be whole, and what is there may turn out not to be.
            is_afresh = afresh or self._is_damaged(snapshot_id)
            facts = await self._mover.adopt(replace(item, heard=heard), afresh=is_afresh)
        self._known |= refs
        snapshot_bytes = facts.memory_total_bytes + facts.disk_total_bytes + facts.device_bytes
        log.info("fetched from the object store", snapshot=snapshot_id, bytes=snapshot_bytes, with_image=bool(images))
        return Fetched(is_fetched=True, snapshot_bytes=snapshot_bytes, with_image=bool(images))

    async def mend_image(self, snapshot_id: SnapshotId, tenant_id: TenantId, file: str) -> Fetched:
        refs = self._refs_here(snapshot_id)
        if refs is None:
            refs = _images_of(snapshot_of(await self._downloader.open(ItemKey(Scope(tenant_id), snapshot_id))))
        for ref in refs:
            if not await asyncio.to_thread(self._images.holds, ref, file):
                continue
            await self._images.renew(await self._downloader.open(image_key(ref)), file)
            if self._renewed is not None:
                await self._renewed(ref.image)
            log.info("a damaged file was fetched from the object store", file=file)
            return Fetched(is_fetched=True, with_image=True)
        return HERE

    @contextmanager
    def _progress(self, snapshot_id: SnapshotId, items: Sequence[StoredItem]) -> Iterator[Callable[[int], None]]:
        """While all this comes, ``fetching`` tells how much of it has."""
        self._coming[snapshot_id] = Fetching(0, sum(item.stored_bytes() for item in items))

        def heard(count: int) -> None:
            before = self._coming[snapshot_id]
            self._coming[snapshot_id] = replace(before, read_bytes=before.read_bytes + count)

        try:
            yield heard
        finally:
            del self._coming[snapshot_id]

    def fetching(self, snapshot_id: SnapshotId) -> Fetching | None:
        return self._coming.get(snapshot_id)

    def _refs_here(self, snapshot_id: SnapshotId) -> frozenset[BaseRef] | None:
        """What a snapshot lies on; None when it is not here, or not readable."""
        try:
            return _images_of(self._store.manifest(snapshot_id))
        except (NotFound, CorruptSnapshot):
            return None

    def _is_damaged(self, snapshot_id: SnapshotId) -> bool:
        try:
            self._store.manifest(snapshot_id)
        except NotFound:
            return False
        except CorruptSnapshot:
            return True
        return False

    async def _is_here(self, snapshot_id: SnapshotId) -> bool:
        """As far as a wake that is about to check everything need know. Its images are looked at, also when they were seen."""
        refs = self._refs_here(snapshot_id)
        if refs is None:
            return False
        for ref in refs:
            if not await asyncio.to_thread(self._images.has, ref):
                self._known.discard(ref)
                return False
            self._known.add(ref)
        return True

    async def verify(self, snapshot_id: SnapshotId, tenant_id: TenantId) -> tuple[Damage, ...]:
        key = ItemKey(Scope(tenant_id), snapshot_id)
        try:
            found = await self._downloader.verify(key)
        except CorruptSnapshot as error:
            return (Damage(f"store/{key}", error.message),)
        return tuple(Damage(f"store/{key}/{one.file}", f"Chunk {one.number} of it cannot be read: {one.why}") for one in found)

    # ---------------------------------------------------------------------------------------------------------------- removal

    async def evict(self, snapshot_id: SnapshotId) -> int:
        if self._starts.reads(snapshot_id):
            return 0
        task = asyncio.create_task(asyncio.to_thread(self._store.delete, (snapshot_id,)), name=f"evict-{snapshot_id}")
        self._evicting[snapshot_id] = task
        task.add_done_callback(lambda _: self._evicting.pop(snapshot_id, None))
        return await asyncio.shield(task)

    async def shred(self, tenant_id: TenantId) -> None:
        await asyncio.to_thread(self._parts.remote.keyring.shred, Scope(tenant_id))

    async def collect(self, scope: str) -> Reclaimed:
        collected = await self._collector.collect(Scope(scope))
        if collected is None:
            return Reclaimed(0, 0, 0, 0)
        try:
            rewritten = await self._collector.rewrite(Scope(scope))
        except Shredded:  # nobody can tell what is alive in its packs, and nothing is: they go as they are
            rewritten = Rewritten(0, 0)
        return Reclaimed(collected.packs_deleted, collected.bytes_deleted, collected.strays_deleted, rewritten.packs)


class _Sum:
    """Progress of an upload that consists of several: its images, then itself."""

    def __init__(self, told: Callable[[Sent], None]) -> None:
        self._told = told
        self._before = Sent(0, 0)
        self._latest = Sent(0, 0)

    def now(self, moved: Moved) -> Sent:
        before = self._before
        self._latest = Sent(before.read_bytes + moved.content_bytes, before.sent_bytes + moved.sent_bytes)
        self._told(self._latest)
        return self._latest

    def next(self) -> None:
        self._before = self._latest


def _images_of(manifest: Manifest) -> frozenset[BaseRef]:
    """The images and goldens below a snapshot's disk and memory; a base of its own goes with the snapshot itself."""
    refs = (manifest.disk_base, *(() if manifest.memory is None else (manifest.memory.base,)))
    return frozenset(BaseRef(ref.image, ref.golden) for ref in refs)
