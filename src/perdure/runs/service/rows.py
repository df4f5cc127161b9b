"""Decisions as parameters of statements: an execution's row, its operations that changed, its new entries and their hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from perdure.runs.engine import CodeRule, Decision, Entry, Op, Reason, State, head_of, op_text
from perdure.runs.engine.facts import Beaten
from perdure.runs.service.model import LEASE_S

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Kept:
    """A state as it is stored, and the hash at which the chain of its history ends."""

    tenant_id: str
    state: State
    hash: str


@dataclass(frozen=True, slots=True)
class Claim:
    """Who takes the invocation that a decision begins."""

    worker_id: str
    deadline_at: datetime
    slot: int | None


@dataclass(frozen=True, slots=True)
class Place:
    """What a new execution's row holds beside its state."""

    tenant_id: str
    input_digest: bytes
    priority: int
    key: str | None


def entry_hash(previous: str, execution_id: str, seq: int, entry: Mapping[str, Any]) -> str:
    """sha256 in hex over the lines: previous hash ('' for the first), execution, seq, ``at`` in microseconds since 1970,
    ``kind``, ``actor``, ``digest`` of the fact."""
    micros = (entry["at"] - _EPOCH) // timedelta(microseconds=1)
    fields = (previous, execution_id, seq, micros, entry["kind"], entry["actor"], entry["digest"])
    return hashlib.sha256("\n".join(map(str, fields)).encode()).hexdigest()


def digest_of(text: str | None) -> bytes:
    return hashlib.sha256(b"" if text is None else b"=" + text.encode("utf-8", "surrogateescape")).digest()


def begin_parameters(decision: Decision, place: Place, actor: str) -> dict[str, Any]:
    """Of ``runs.begin``."""
    state = decision.state
    started = state.started
    parent = started.parent
    return _common("", decision, actor) | {
        "tenant_id": place.tenant_id,
        "function": started.function,
        "name": started.name,
        "input_digest": place.input_digest,
        "priority": place.priority,
        "key": place.key,
        "parent_id": parent.execution_id if parent else None,
        "parent_operation": parent.operation_id if parent else None,
        "started": started.model_dump_json(exclude_none=True),
        "at": state.started_at,
    }


def commit_parameters(before: Kept, decision: Decision, actor: str, claim: Claim | None) -> dict[str, Any]:
    """Of ``runs.commit``."""
    state = decision.state
    has_just_ended = state.has_ended and not before.state.has_ended
    return _common(before.hash, decision, actor) | {
        "before": before.state.seq,
        "ended_at": state.ended_at,
        "owes_parent": has_just_ended and state.started.parent is not None,
        "invocation": state.invocation.number if state.invocation else None,
        "lease_s": LEASE_S,
        "worker_id": claim.worker_id if claim else None,
        "slot": claim.slot if claim else None,
        "deadline_at": claim.deadline_at if claim else None,
    }


def _common(previous: str, decision: Decision, actor: str) -> dict[str, Any]:
    state, standing = decision.state, decision.standing
    is_ready = standing.reason is Reason.INVOKE
    ops = _changed(decision)
    texts = [entry.fact.model_dump_json(exclude_none=True) for entry in decision.entries]
    digests = [hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest() for text in texts]
    hashes = chain(previous, state.id, decision.entries, actor, digests)
    return {
        "id": state.id,
        "seq": state.seq,
        "status": state.status.value,
        "reason": standing.reason.value,
        "invoke_at": (standing.invoke_at or state.at) if is_ready else None,
        "timer_at": standing.timer_at,
        "bound_digest": state.born if state.code is CodeRule.EXACT else None,
        "head": head_of(state),
        "hash": hashes[-1],
        "op_ids": [op.id for op in ops],
        "op_positions": [op.position for op in ops],
        "op_types": [op.type.value for op in ops],
        "op_statuses": [op.status.value for op in ops],
        "ops": [op_text(op) for op in ops],
        "actor": actor,
        "seqs": [entry.seq for entry in decision.entries],
        "ats": [entry.at for entry in decision.entries],
        "kinds": [entry.fact.kind for entry in decision.entries],
        "digests": digests,
        "facts": texts,
        "hashes": hashes,
    }


def _changed(decision: Decision) -> list[Op]:
    """The operations that the entries have changed. A heartbeat moves a timer, and is nothing that a function is told."""
    state = decision.state
    beaten = [entry.fact.operation_id for entry in decision.entries if isinstance(entry.fact, Beaten)]
    touched = {op.id: op for op in state.touched_since(decision.entries[0].seq - 1)}
    return [*(touched | {op_id: state.operations[op_id] for op_id in beaten}).values()]


def chain(previous: str, execution_id: str, entries: Sequence[Entry], actor: str, digests: Sequence[str]) -> list[str]:
    hashes: list[str] = []
    for entry, digest in zip(entries, digests, strict=True):
        told = {"at": entry.at, "kind": entry.fact.kind, "actor": actor, "digest": digest}
        previous = entry_hash(previous, execution_id, entry.seq, told)
        hashes.append(previous)
    return hashes
