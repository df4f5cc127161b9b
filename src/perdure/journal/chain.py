"""The hash chain, as a pure function. ``journal_append`` in the first migration computes the same in the database."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Link:
    """One entry as the chain sees it; ``body`` is the exact JSON text that was stored."""

    tenant_id: str
    workspace_id: str
    seq: int
    at: datetime
    kind: str
    generation: int
    body: str
    hash: str


@dataclass(frozen=True, slots=True)
class Break:
    """Where a chain does not hold, and why, in a sentence."""

    workspace_id: str
    seq: int
    reason: str


def link_hash(previous_hash: str, link: Link) -> str:
    """sha256 in hex over the previous hash and every field but the hash; ``at`` counts in microseconds since 1970."""
    micros = (link.at - _EPOCH) // timedelta(microseconds=1)
    fields = (previous_hash, link.tenant_id, link.workspace_id, link.seq, micros, link.kind, link.generation, link.body)
    return hashlib.sha256("\n".join(str(field) for field in fields).encode()).hexdigest()


def check(links: list[Link]) -> list[Break]:
    """Breaks of one workspace's chain, given all its entries in order."""
    breaks = []
    previous: Link | None = None
    for position, link in enumerate(links, start=1):
        if link.seq != position:
            breaks.append(Break(link.workspace_id, link.seq, f"Entry {position} is missing."))
            return breaks
        if link.hash != link_hash(previous.hash if previous else "", link):
            breaks.append(Break(link.workspace_id, link.seq, "The entry was changed after it was written."))
        if previous and link.at < previous.at:
            breaks.append(Break(link.workspace_id, link.seq, "The entry is older than the one before it."))
        if previous and link.generation < previous.generation:
            breaks.append(Break(link.workspace_id, link.seq, "The generation went back."))
        previous = link
    return breaks
