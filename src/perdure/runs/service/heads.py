"""Heads of all histories, signed every hour and kept outside the database, so that a history which was cut off at its end, or
removed as a whole, is noticed too.

An object is written for each signing that has something to say: the heads that have moved since the one before, the digest of
that, and an HMAC over all by a key that is derived from the master key. One server signs at a time, under the lock of a row; an
object that was written by a server which died before its commit is written again.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import NotFound, PerdureError
from perdure.core.pauses import pause
from perdure.db.database import Database, Transaction

log = structlog.get_logger(__name__)

PURPOSE = "history-heads"
EVERY_S = 3600.0
#: How often a server looks whether it is time.
PASS_S = 300.0
#: Heads in one object; the next signing has the rest.
MOST = 20_000
_FIRST = ""


class Objects(Protocol):
    """As much of an object store as this needs."""

    async def put(self, name: str, data: bytes) -> None: ...

    async def get(self, name: str) -> bytes: ...

    async def size(self, name: str) -> int | None: ...

    def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]: ...


@dataclass(frozen=True, slots=True)
class Head:
    seq: int
    hash: str
    at: str


@dataclass
class Signed:
    """What all signings together say: the last head of each (kind, id); and what is wrong with an object, by its name."""

    heads: dict[tuple[str, str], Head] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)


class SignedHeads:
    """``start`` before use, ``close`` after; ``sign`` and ``read`` need neither."""

    def __init__(self, database: Database, objects: Objects, key: bytes) -> None:
        self._database = database
        self._objects = objects
        self._key = key
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="history-heads")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                signed = await self.sign()
                while signed == MOST:
                    signed = await self.sign(every_s=0)
            except PerdureError as error:
                log.warning("heads of histories are not signed for a while", error=error.message, internal=error.internal)
            await pause(PASS_S)

    # ---------------------------------------------------------------------------------------------------------------- signing

    async def sign(self, every_s: float = EVERY_S) -> int:
        """Sign what has moved, if it is time and nobody else does; how many heads."""
        await self._database.run("heads.ensure")
        async with self._database.transaction() as transaction:
            turn = await transaction.one("heads.turn", every_s=every_s)
            if turn is None or not turn["is_due"]:
                return 0
            number, digest = await self._last(transaction, turn)
            rows = await transaction.all("heads.changed", installation=turn["installation"], limit=MOST)
            if not rows:
                return 0
            data = self._object(turn, number + 1, digest, rows)
            await self._objects.put(_name(turn["installation"], number + 1), data)
            crashpoint(CrashPoint.RUNS_HEADS_PUT)
            heads = [{key: row[key] for key in ("tenant_id", "kind", "id", "seq", "hash")} for row in rows]
            own = {"installation": turn["installation"]}
            await transaction.run("heads.signed", heads=json.dumps(heads), **own)
            await transaction.run("heads.advance", number=number + 1, digest=hashlib.sha256(data).hexdigest(), **own)
        crashpoint(CrashPoint.RUNS_HEADS_SIGNED)
        return len(rows)

    async def _last(self, transaction: Transaction, turn: dict[str, Any]) -> tuple[int, str]:
        """The number and digest of the last object. Where the store does not have it, as another one, all begins anew."""
        number, digest = turn["number"], turn["digest"]
        if number and await self._objects.size(_name(turn["installation"], number)) is None:
            log.warning("the store does not have the heads of histories that were signed last; all are signed anew")
            await transaction.run("heads.unsign", installation=turn["installation"])
            return 0, _FIRST
        return number, digest

    def _object(self, turn: dict[str, Any], number: int, previous: str, rows: list[dict[str, Any]]) -> bytes:
        """A line with the HMAC, and what it is of."""
        body = {
            "installation": turn["installation"],
            "number": number,
            "previous": previous,
            "at": turn["now"].isoformat(),
            "heads": [[row["kind"], row["id"], row["seq"], row["hash"]] for row in rows],
        }
        text = json.dumps(body, separators=(",", ":")).encode()
        return hmac.digest(self._key, text, "sha256").hex().encode() + b"\n" + text

    # ---------------------------------------------------------------------------------------------------------------- reading

    async def read(self) -> Signed:
        """All that was signed in this life of the installation. Raises Unavailable."""
        row = await self._database.one("heads.installation")
        assert row is not None, "a migration has made it"
        names = [name async for name, _ in self._objects.list(f"heads/{row['id']}/")]
        signed, previous = Signed(), _FIRST
        for number, name in enumerate(sorted(names), start=1):
            try:
                data = await self._objects.get(name)
            except NotFound:
                signed.wrong[name] = "It was removed while it was read."
                return signed
            reason, body = self._judged(data, number, previous)
            if body is None:
                signed.wrong[name] = reason
                return signed  # nobody knows what those behind it follow
            for kind, history, seq, head in body["heads"]:
                signed.heads[kind, history] = Head(seq, head, body["at"])
            previous = hashlib.sha256(data).hexdigest()
        return signed

    def _judged(self, data: bytes, number: int, previous: str) -> tuple[str, dict[str, Any] | None]:
        mac, _, text = data.partition(b"\n")
        if not hmac.compare_digest(mac, hmac.digest(self._key, text, "sha256").hex().encode()):
            return "These signed heads were changed after they were signed, or signed with another master key.", None
        body: dict[str, Any] = json.loads(text)
        if body["number"] != number:
            return f"These have the number {body['number']}; the signed heads with the number {number} are missing.", None
        if body["previous"] != previous:
            return "The signed heads before these are not the ones that they follow.", None
        return "", body


def _name(installation: str, number: int) -> str:
    return f"heads/{installation}/{number:012}.json"
