"""Commands that are started at most once for an idempotency key, whatever happens to the workspace in between.

The key is written down before the command is started, under the id that the command will have (``core.ids.keyed_exec``). Asked
for again it only ever attaches: what a guest forgets (old commands, a boot from disk) and what a rewind or the loss of its memory
takes away is then *forgotten*, said in an error, and not run again. A key is free again only when the command was refused before
it began. Keys count in one workspace, for a week; a fork is another workspace.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from perdure.core import metrics
from perdure.core.errors import AlreadyExists, Forgotten, KeyReused, NotFound, PerdureError
from perdure.core.ids import ExecId, TenantId, WorkspaceId
from perdure.db.database import Database
from perdure.wire.node import ExecHandle, ExecSpec
from perdure.workspaces.model import Awake


@dataclass(frozen=True, slots=True)
class ExecKey:
    """What a key stands for. ``generation``: the workspace's when it was first used."""

    tenant_id: TenantId
    workspace_id: WorkspaceId
    key: str
    exec_id: ExecId
    digest: bytes
    generation: int


class ExecKeyStore(Protocol):
    """Where keys are written down."""

    async def claim(self, wanted: ExecKey) -> ExecKey | None:
        """Let the key stand for this; returns what it stands for already, else None."""
        ...

    async def release(self, wanted: ExecKey) -> None: ...


class StoredExecKeys:
    """An ``ExecKeyStore`` in the database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def claim(self, wanted: ExecKey) -> ExecKey | None:
        place = {"tenant_id": wanted.tenant_id, "workspace_id": wanted.workspace_id, "key": wanted.key}
        while True:
            made = {"exec_id": wanted.exec_id, "digest": wanted.digest, "generation": wanted.generation}
            if await self._database.one("exec_keys.claim", **place, **made) is not None:
                await self._database.run("exec_keys.forget_old")
                return None
            row = await self._database.one("exec_keys.find", **place)
            if row is not None:
                found = ExecId(row["exec_id"]), bytes(row["digest"]), int(row["generation"])
                return ExecKey(wanted.tenant_id, wanted.workspace_id, wanted.key, *found)
            # It was released in between: then it is free.

    async def release(self, wanted: ExecKey) -> None:
        place = {"tenant_id": wanted.tenant_id, "workspace_id": wanted.workspace_id, "key": wanted.key}
        await self._database.run("exec_keys.release", **place)


class KeyedExecs:
    """Starts commands for keys."""

    def __init__(self, store: ExecKeyStore) -> None:
        self.store = store
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    async def start(self, awake: Awake, spec: ExecSpec, key: str, check: Callable[[], None] | None = None) -> ExecHandle:
        """Start the command, or attach to the one that the key stands for. ``check`` may refuse, by raising, what would run anew.

        Raises KeyReused when that is another one, Forgotten when it was started and nobody knows any more what became of it.
        """
        workspace = awake.workspace
        wanted = ExecKey(workspace.tenant_id, workspace.id, key, spec.exec_id, _digest(spec), workspace.generation)
        turn = self._turns.setdefault((workspace.id, key), asyncio.Lock())
        async with turn:  # who comes second attaches to what the first has started by then
            known = await self.store.claim(wanted)
            if known is None:
                return await self._start(awake, spec, wanted, check)
        if known.digest != wanted.digest:
            raise KeyReused(f"The idempotency key {key!r} was used for another command in {workspace.name!r}.")
        try:
            return await awake.guest.attach_exec(known.exec_id)
        except NotFound as error:
            raise _forgotten(known, workspace.generation) from error

    async def _start(self, awake: Awake, spec: ExecSpec, claimed: ExecKey, check: Callable[[], None] | None) -> ExecHandle:
        try:
            if check is not None:
                check()
            handle = await awake.guest.start_exec(spec)
        except AlreadyExists:  # the guest remembers longer than a key counts
            return await awake.guest.attach_exec(spec.exec_id)
        except PerdureError as error:
            if not error.ambiguous:
                await self.store.release(claimed)
            raise
        metrics.EXECS.add()
        return handle


def _digest(spec: ExecSpec) -> bytes:
    """Of all that makes it this command. Not of its id, which follows from the key."""
    fields = asdict(spec)
    del fields["exec_id"]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()


def _forgotten(known: ExecKey, generation: int) -> Forgotten:
    if known.generation == generation:
        why = "its workspace remembers only the last commands that ended, and none over a restart of its agent"
    else:
        why = f"that was at generation {known.generation} of its workspace, which is now at {generation}"
    return Forgotten(
        f"The command of this idempotency key was asked for before, and what became of it is not known any more: {why}.",
        hint="It may have run, in part or whole. Look at what it was to do; run it again, under a new key, only if that is safe.",
    )
