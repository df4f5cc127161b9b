"""The rows that decide what the object store holds: the protocol between who moves bytes and who keeps the truth.

Bytes are moved on the node's side, rows are kept in PostgreSQL. Whether something is in the store is decided by a row and by
nothing else: no conditional PUT is ever sent, so a store that ignores those is as good as one that does not.

Three kinds of rows. An **item** is what is stored as a whole, such as a snapshot or an image. A **pack** is one object with many
chunks in it; its row is written before the object is. A **hold** says that an item needs a pack; while an upload is under way the
same row is called a pin. A pack that nobody holds is condemned in one pass of the garbage collection and deleted in a later one.

Names of packs and manifests are never used twice, so that a PUT or DELETE which the network delivers late, after its sender has
died, can hit nothing that is alive.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Protocol

from perdure.core.errors import InvalidRequest
from perdure.core.ids import is_id

PackId = NewType("PackId", str)
#: Whose content it is: a tenant's id, or IMAGES. Chunks are shared within a scope and never across two.
Scope = NewType("Scope", str)
IMAGES = Scope("images")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,120}")


@dataclass(frozen=True, slots=True, order=True)
class ItemKey:
    """What an item is called. ``name`` is used once and never for other content: a snapshot's id, an image's content."""

    scope: Scope
    name: str

    def __post_init__(self) -> None:
        check_scope(self.scope)
        if not _NAME.fullmatch(self.name):
            raise InvalidRequest(
                f"{self.name!r} cannot be the name of something in the store.",
                hint="Use 1 to 121 letters, digits, dashes and underscores, with a letter or digit first.",
            )

    def __str__(self) -> str:
        return f"{self.scope}/{self.name}"


def check_scope(scope: Scope) -> Scope:
    """Return it, or raise InvalidRequest when it is neither a tenant nor IMAGES."""
    if scope != IMAGES and not is_id(scope, "ten"):
        raise InvalidRequest(f"{scope!r} is no scope of the store.", hint=f"Use a tenant's id or {IMAGES!r}.")
    return scope


class PackState(StrEnum):
    PENDING = "pending"  # the object may be there, whole or not at all
    STORED = "stored"
    CONDEMNED = "condemned"  # nobody held it at some epoch; a pin brings it back
    DELETING = "deleting"  # no way back: the object may be gone


class ItemState(StrEnum):
    UPLOADING = "uploading"
    DURABLE = "durable"  # this, and only this, is durable(store)
    RELEASED = "released"  # nobody wants it; it goes when nothing needs it


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack's row. ``size`` and ``index_bytes`` (the index at its end, foot included) are bytes as stored."""

    pack_id: PackId
    scope: Scope
    size: int
    index_bytes: int
    state: PackState = PackState.PENDING


@dataclass(frozen=True, slots=True)
class Item:
    """An item's row. ``attempt`` grows with every begin; with the name it names the manifest's object. ``checksum`` is sha256 in
    hex of that object, None until the item is durable."""

    key: ItemKey
    state: ItemState
    attempt: int
    needs: tuple[ItemKey, ...] = ()
    size: int = 0
    checksum: str | None = None


class Rows(Protocol):
    """What moving bytes asks for. Every method is one transaction. Methods with ``attempt`` raise StaleGeneration once another
    begin, a release or the garbage collection has ended that attempt; then nothing was changed. All may raise Unavailable."""

    async def begin(self, key: ItemKey, needs: Sequence[ItemKey] = ()) -> Item:
        """Start to upload, or start again: the pins of earlier attempts stay. A durable item is returned as it is.

        Raises Conflict when the item was released, or when something it needs is not durable.
        """
        ...

    async def pin(self, key: ItemKey, attempt: int, packs: Sequence[PackId]) -> frozenset[PackId]:
        """Hold these packs for an upload; returns those that are stored and held now. Condemned ones are rescued."""
        ...

    async def announce(self, key: ItemKey, attempt: int, pack: Pack) -> None:
        """Intent: this pack will be written. It is pinned from now on."""
        ...

    async def stored(self, key: ItemKey, attempt: int, pack_id: PackId) -> None:
        """The pack's object is there, whole."""
        ...

    async def commit(self, key: ItemKey, attempt: int, packs: frozenset[PackId], manifest: tuple[int, str]) -> Item:
        """The commit point: the item is durable, holds exactly ``packs``, and its manifest has this size and checksum.

        Raises Conflict when one of them is not stored and pinned by this item. Repeating it changes nothing.
        """
        ...

    async def item(self, key: ItemKey) -> Item:
        """Raises NotFound."""
        ...

    async def holds(self, key: ItemKey) -> list[Pack]:
        """The packs that an item holds or pins, in whatever state, by id."""
        ...

    async def packs(self, scope: Scope) -> list[Pack]:
        """The packs of a scope that a pin could get, by id."""
        ...


class Catalogue(Rows, Protocol):
    """All of it: what is wanted, and what goes, besides."""

    def alone(self, key: ItemKey) -> AbstractAsyncContextManager[None]:
        """Wait until nobody else is alone with this item, on any node, and be it. It ends with who died. What is lost meanwhile
        with a connection to the rows is only the order: two attempts of one item still cannot both commit."""
        ...

    async def release(self, key: ItemKey) -> None:
        """Nobody wants the item any more. One that is not there is fine."""
        ...

    async def items(self, scope: Scope) -> list[Item]:
        """Every item of a scope, by name."""
        ...

    async def advance(self, scope: Scope) -> int | None:
        """Begin the next epoch of the garbage collection; returns its number. None when the present one is too young: it lasts
        its time after what was condemned and noted in it, whoever asks.
        """
        ...

    async def condemn(self, scope: Scope, epoch: int) -> list[Pack]:
        """First pass: let go of items that were released and that nothing needs, and of uploads that nothing was heard of since
        the epoch before; condemn packs that nobody holds. Second pass, for what an earlier epoch condemned: returns the packs
        whose objects must be deleted now, those included that an earlier call returned and nobody dropped. When that is not the
        epoch any more, only the latter.
        """
        ...

    async def drop(self, packs: Sequence[PackId]) -> None:
        """The objects of these packs, which ``condemn`` had returned, are gone."""
        ...

    async def strays(self, scope: Scope, epoch: int, packs: Sequence[PackId], manifests: Sequence[tuple[str, int]]) -> list[str]:
        """Of objects that were listed *before* this call, those that no row accounts for, and did not in an earlier epoch either.
        Manifests are (name, attempt). Returns pack ids and ``NAME.ATTEMPT``."""
        ...

    async def replace(self, key: ItemKey, attempt: int, old: PackId, new: PackId | None, seen: frozenset[ItemKey]) -> bool:
        """Let everyone who holds ``old`` hold ``new`` in its place, which the upload ``key`` has stored.

        False, and nothing done, unless all holders are among ``seen`` and durable: another one may need a chunk that was
        thought dead. With ``new`` None, ``old`` is held by nobody afterwards.
        """
        ...
