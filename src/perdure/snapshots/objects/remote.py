"""One object store as everything here uses it: where things lie in it, whose it is, and a cache of its packs' indexes.

::

    perdure.json                     whose store this is
    SCOPE/packs/PACK                 SCOPE is a tenant's id, or "images"
    SCOPE/items/NAME.ATTEMPT         manifests
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from perdure.core.errors import Conflict, CorruptSnapshot, NotFound, Unavailable
from perdure.core.ids import mint
from perdure.snapshots.objects.client import Objects
from perdure.snapshots.objects.keys import Keyring
from perdure.snapshots.objects.packs import FOOT, PackIndex, index_bytes, read_index
from perdure.wire.objects import Item, ItemKey, Pack, PackId, Scope

OWNER = "perdure.json"
_PACK = re.compile(r"^pck_[0-9a-z]{26}$")
_MANIFEST = re.compile(r"^([A-Za-z0-9][A-Za-z0-9_-]*)\.([0-9]{1,19})$")
_INDEXES_KEPT = 4096
#: Of what we know to be in a store, how much is looked for when it does not say whose it is.
_RECOGNIZED_BY = 5
_SHOWN_MAX = 80
#: No PUT lasts as long. One that does all the same fails and is tried again.
LEFT_OVER_MS = 3_600_000


class Remote:
    """A store and the keys to it. ``now_ms`` is for ids only, which sort by creation."""

    def __init__(self, objects: Objects, keyring: Keyring, now_ms: Callable[[], int]) -> None:
        self.objects = objects
        self.keyring = keyring
        self._now_ms = now_ms
        self._indexes: OrderedDict[PackId, PackIndex] = OrderedDict()

    def new_name(self, prefix: str) -> str:
        return mint(prefix, now_ms=self._now_ms())

    async def sweep(self) -> int:
        """Remove what PUTs have left whose process died. Returns how many."""
        return await self.objects.sweep(self._now_ms() - LEFT_OVER_MS)

    async def claim(self, owner: str, *, take: bool = False, known: Sequence[Item] = ()) -> None:
        """Make sure that this store belongs to the installation ``owner``; with ``take``, make it so. ``known``: what is durable
        in it by our rows.

        Raises Conflict when it is another's: to its garbage collection our objects would be strays, and its to ours; when it
        holds something, does not say whose it is and has nothing of what we know, for the same reason; and when it should hold
        something and is empty: then it is not that store, and whatever we call durable in it is not.
        """
        found = await self._owner()
        if found is None and not take:
            found = await self._unmarked(owner, known)
        if found is None or (take and found != owner):
            await self.objects.put(OWNER, _mark(owner))
            found = await self._owner()
            if found is None:
                raise Unavailable(f"The object store acknowledged {OWNER} and does not have it.", hint="Try again.")
        if found != owner:
            raise Conflict(
                "The object store belongs to another installation.",
                hint="Use another bucket or prefix, or take it over on purpose when that installation is gone for good.",
                internal=f"owner {found}, we are {owner}",
            )

    async def _unmarked(self, owner: str, known: Sequence[Item]) -> str | None:
        """Of a store that does not say whose it is: None when it may be marked as ours, or who has marked it meanwhile."""
        lies_there = await self._first_object()
        if lies_there is None:
            if not known:
                return None
            raise Conflict(
                "The object store is empty, and this installation has uploaded snapshots: it is another one, or was emptied.",
                hint="Check PERDURE_STORE_URL and PERDURE_STORE_OPTIONS. If what it held is lost for good, unset them, start, "
                "make a backup and restore it into a new home, which may begin a new store.",
            )
        found = await self._owner()  # again: another node of ours may have marked it and begun to upload
        if found is not None or await self._holds_one_of(known):
            return found
        raise Conflict(
            f"The object store is not empty (it holds {lies_there[:_SHOWN_MAX]!r}), has no {OWNER} that says whose it is, and "
            "nothing of what this installation has uploaded.",
            hint="Check PERDURE_STORE_URL, or use a bucket or prefix of its own; 'perdure recover --from-store' takes over what "
            "an installation without its database has left. To use it all the same, with all that this installation does not "
            f"know in it removed in time, put an object {OWNER} into it that says {_mark(owner).decode()}",
        )

    async def _holds_one_of(self, known: Sequence[Item]) -> bool:
        """Whether the manifest of something that we know is there, byte for byte: then the store is ours, without its mark."""
        for item in known[-_RECOGNIZED_BY:]:
            try:
                data = await self.objects.get(manifest_name(item.key, item.attempt))
            except NotFound:
                continue
            if hashlib.sha256(data).hexdigest() == item.checksum:
                return True
        return False

    async def _owner(self) -> str | None:
        try:
            data = await self.objects.get(OWNER)
        except NotFound:
            return None
        try:
            return str(json.loads(data)["owner"])
        except (ValueError, KeyError, TypeError) as error:
            if await self._first_object() is None:
                return None  # whoever made it first did not get further
            raise CorruptSnapshot(
                f"The object {OWNER} of the store is damaged.",
                hint=f"Put {OWNER} back as it was; or remove it: a store that holds what this installation has uploaded is "
                "recognized and marked anew.",
                internal=str(error),
            ) from error

    async def _first_object(self) -> str | None:
        """The name of something that is there beside the sign of whose it is."""
        async for name, _ in self.objects.list(""):
            if name != OWNER:
                return name
        return None

    async def index(self, pack: Pack) -> PackIndex:
        """The index of a pack. Raises CorruptSnapshot naming it, also when it is missing."""
        known = self._indexes.get(pack.pack_id)
        if known is None:
            at = pack.size - pack.index_bytes
            try:
                tail = await self.objects.read(pack_name(pack.scope, pack.pack_id), at, pack.index_bytes)
            except NotFound as error:
                raise missing(pack.pack_id) from error
            known = read_index(pack.pack_id, pack.size, tail, self.keyring.of(pack.scope))
            self.remember(known)
        self._indexes.move_to_end(pack.pack_id)
        return known

    def remember(self, index: PackIndex) -> None:
        self._indexes[index.pack_id] = index
        while len(self._indexes) > _INDEXES_KEPT:
            self._indexes.popitem(last=False)

    def forget(self, packs: Iterable[PackId]) -> None:
        for pack_id in packs:
            self._indexes.pop(pack_id, None)

    async def pack_facts(self, scope: Scope, pack_id: PackId, size: int) -> Pack:
        """A pack's row, made from the object itself. Raises CorruptSnapshot."""
        if size < FOOT:
            raise CorruptSnapshot(f"The stored object {pack_id} is damaged: it is too short.")
        foot = await self.objects.read(pack_name(scope, pack_id), size - FOOT, FOOT)
        length = index_bytes(pack_id, foot)
        if length > size:
            raise CorruptSnapshot(f"The stored object {pack_id} is damaged: its foot does not fit its size.")
        return Pack(pack_id, scope, size, length)

    async def listed(self, scope: Scope) -> tuple[dict[PackId, int], list[tuple[str, int]]]:
        """All packs with their sizes, and all manifests as (name, attempt). Other objects are none of ours and left alone."""
        packs = {PackId(name): size async for name, size in self._names(pack_name(scope, PackId(""))) if _PACK.match(name)}
        matches = [_MANIFEST.match(name) async for name, _ in self._names(f"{scope}/items/")]
        return packs, [(match[1], int(match[2])) for match in matches if match]

    async def _names(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        async for name, size in self.objects.list(prefix):
            yield name.rpartition("/")[2], size


def _mark(owner: str) -> bytes:
    """What OWNER says."""
    return json.dumps({"owner": owner}).encode()


def pack_name(scope: Scope, pack_id: PackId) -> str:
    return f"{scope}/packs/{pack_id}"


def manifest_name(key: ItemKey, attempt: int) -> str:
    return f"{key.scope}/items/{key.name}.{attempt}"


def missing(pack_id: PackId) -> CorruptSnapshot:
    return CorruptSnapshot(
        f"The stored object {pack_id} is missing or cut short.",
        hint="Wake the workspace from a snapshot that does not need it (perdure snapshot ls NAME).",
    )
