"""Decisions as parameters of statements: an execution's row, its operations that changed, its new entries and their hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from perdure.core.errors import InvalidRequest
from perdure.runs.engine import CodeRule, Decision, Entry, Op, Reason, State, head_of, op_text
from perdure.runs.engine.facts import Beaten
from perdure.runs.service.model import LEASE_S

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Kept:
    """A state as it is stored, and the hash at which the chain of its history ends. ``is_limited``: of its function or its key
    only so many may be in flight."""

    tenant_id: str
    state: State
    hash: str
    is_limited: bool


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
    """Raises InvalidRequest for half a character: no JSON has it."""
    try:
        return hashlib.sha256(b"" if text is None else b"=" + text.encode()).digest()
    except UnicodeEncodeError as error:
        raise InvalidRequest("The input is no text: it has half of a surrogate pair.", hint="Send it as UTF-8.") from error


def beginning(decision: Decision, place: Place, actor: str) -> dict[str, Any]:
    """One of ``runs.begin``."""
    state = decision.state
    started = state.started
    parent = started.parent
    return _common("", decision, actor) | {
        "tenant_id": place.tenant_id,
        "function": started.function,
        "name": started.name,
        "arn": started.arn,
        "input_digest": place.input_digest.hex(),
        "priority": place.priority,
        "key": place.key,
        "parent_id": parent.execution_id if parent else None,
        "parent_operation": parent.operation_id if parent else None,
        "started": started.model_dump_json(exclude_none=True),
        "at": state.started_at.isoformat(),
    }


def change(before: Kept, decision: Decision, actor: str, claim: Claim | None) -> dict[str, Any]:
    """One of ``runs.commit``."""
    state = decision.state
    has_just_ended = state.has_ended and not before.state.has_ended
    return _common(before.hash, decision, actor) | {
        "before": before.state.seq,
        "ended_at": _text(state.ended_at),
        "owes_parent": has_just_ended and state.started.parent is not None,
        "invocation": state.invocation.number if state.invocation else None,
        "lease_s": LEASE_S,
        "worker_id": claim.worker_id if claim else None,
        "slot": claim.slot if claim else None,
        "deadline_at": claim.deadline_at.isoformat() if claim else None,
    }


def _common(previous: str, decision: Decision, actor: str) -> dict[str, Any]:
    state, standing = decision.state, decision.standing
    invoke_at = (standing.invoke_at or state.at) if standing.reason is Reason.INVOKE else None
    entries = chained(previous, state.id, decision.entries, actor)
    return {
        "id": state.id,
        "seq": state.seq,
        "status": state.status.value,
        "reason": standing.reason.value,
        "invoke_at": _text(invoke_at),
        "timer_at": _text(standing.timer_at),
        "bound_digest": state.born if state.code is CodeRule.EXACT else None,
        "head": head_of(state),
        "hash": entries[-1]["hash"],
        "actor": actor,
        "ops": [_operation(op) for op in _changed(decision)],
        "entries": entries,
    }


def _operation(op: Op) -> dict[str, Any]:
    return {
        "id": op.id,
        "position": op.position,
        "type": op.type.value,
        "status": op.status.value,
        "started_at": op.started_at.isoformat(),
        "op": op_text(op),
    }


def _text(at: datetime | None) -> str | None:
    return at.isoformat() if at is not None else None


def _changed(decision: Decision) -> list[Op]:
    """The operations that the entries have changed. A heartbeat moves a timer, and is nothing that a function is told."""
    state = decision.state
    beaten = [entry.fact.operation_id for entry in decision.entries if isinstance(entry.fact, Beaten)]
    touched = {op.id: op for op in state.touched_since(decision.entries[0].seq - 1)}
    return [*(touched | {op_id: state.operations[op_id] for op_id in beaten}).values()]


def chained(previous: str, execution_id: str, entries: Sequence[Entry], actor: str) -> list[dict[str, Any]]:
    """Entries as they are stored, each with the hash of all up to it."""
    found: list[dict[str, Any]] = []
    for entry in entries:
        fact = entry.fact.model_dump_json(exclude_none=True)
        digest = hashlib.sha256(fact.encode()).hexdigest()
        told = {"at": entry.at, "kind": entry.fact.kind, "actor": actor, "digest": digest}
        previous = entry_hash(previous, execution_id, entry.seq, told)
        found.append({**told, "seq": entry.seq, "at": entry.at.isoformat(), "fact": fact, "hash": previous})
    return found
