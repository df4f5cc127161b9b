"""What a tenant may have, what it has, and whether more may be given to it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from perdure.core.errors import QuotaExceeded

GIB = 1 << 30
#: Names of awake workspaces that an error tells.
SHOWN_MAX = 5


class Quota(StrEnum):
    """By the names that API and database use; the unit is in the name."""

    WORKSPACES = "workspaces"
    MEMORY_AWAKE = "memory_awake_mib"
    STORAGE = "storage_gib"
    EXECS = "execs"


@dataclass(frozen=True, slots=True)
class Limits:
    """None: no limit."""

    workspaces: int | None = None
    memory_awake_mib: int | None = None
    storage_gib: float | None = None
    execs: int | None = None


@dataclass(frozen=True, slots=True)
class Use:
    """What counts: workspaces and branches that are not deleted, have not failed and are not what was left of a lost machine;
    memory of those that have a machine, or are about to; bytes of snapshots, each once, wherever its files are. ``awake`` are
    names of those that use the memory, the largest first."""

    workspaces: int = 0
    memory_awake_mib: int = 0
    storage_bytes: int = 0
    awake: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """What is about to be added. All of it waits while storage is over its limit, however little it adds."""

    workspaces: int = 0
    memory_mib: int = 0
    storage_bytes: int = 0


def refuse(limits: Limits, use: Use, ask: Ask) -> None:
    """Raises QuotaExceeded for the first limit that would be passed."""
    if limits.storage_gib is not None:
        _refuse_storage(limits.storage_gib, use.storage_bytes, ask.storage_bytes)
    if limits.workspaces is not None and ask.workspaces and use.workspaces + ask.workspaces > limits.workspaces:
        raise _exceeded(
            f"The tenant has {use.workspaces} of {limits.workspaces} workspaces, and {ask.workspaces} more would be too many.",
            "Delete one ('perdure rm NAME'), or ask whoever runs the server for more.",
            details=_figures(Quota.WORKSPACES, limits.workspaces, use.workspaces, ask.workspaces),
        )
    if limits.memory_awake_mib is not None and ask.memory_mib:
        _refuse_memory(limits.memory_awake_mib, use, ask.memory_mib)


def refuse_exec(limit: int, running: int) -> None:
    """Raises QuotaExceeded when no further command may run beside those that do."""
    if running >= limit:
        raise _exceeded(
            f"The tenant runs {running} of the {limit} commands that it may run at the same time.",
            "Try again when one has ended.",
            retryable=limit > 0,
            details=_figures(Quota.EXECS, limit, running, 1),
        )


def _refuse_storage(limit_gib: float, used: int, asked: int) -> None:
    limit = limit_gib * GIB
    if used < limit and used + asked <= limit:
        return
    more = f", and {_shown(asked / GIB)} GiB more would be too much" if asked and used < limit else ""
    raise _exceeded(
        f"The tenant stores {_shown(used / GIB)} of {_shown(limit_gib)} GiB{more}.",
        "Remove snapshots ('perdure snapshot rm') or workspaces ('perdure rm'), or ask whoever runs the server for more. What is "
        "awake goes on, and falls asleep with all its work.",
        details=_figures(Quota.STORAGE, limit_gib, round(used / GIB, 6), round(asked / GIB, 6)),
    )


def _refuse_memory(limit: int, use: Use, asked: int) -> None:
    if use.memory_awake_mib + asked <= limit:
        return
    shown = ", ".join(use.awake[:SHOWN_MAX])
    by = f" by {shown}" if shown else ""
    never = asked > limit
    raise _exceeded(
        f"This needs {asked} MiB awake, and {use.memory_awake_mib} of the tenant's {limit} MiB are in use{by}.",
        "It is more than the tenant may ever have awake: ask whoever runs the server."
        if never
        else "Put one to sleep ('perdure sleep NAME'), or try again when one has fallen asleep; none is put to sleep for it.",
        retryable=not never,
        details={**_figures(Quota.MEMORY_AWAKE, limit, use.memory_awake_mib, asked), "awake": shown},
    )


def _shown(gib: float) -> str:
    return f"{gib:.0f}" if gib >= 100 else f"{gib:.3g}"


def _figures(quota: Quota, limit: float, used: float, asked: float) -> dict[str, str]:
    return {"quota": quota.value, "limit": f"{limit:.12g}", "used": f"{used:.12g}", "asked": f"{asked:.12g}"}


def _exceeded(message: str, hint: str, *, details: Mapping[str, str], retryable: bool = False) -> QuotaExceeded:
    error = QuotaExceeded(message, hint=hint)
    error.retryable = retryable
    error.details = details
    return error
