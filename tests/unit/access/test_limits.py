"""What is refused, and what the refusal says (peers: "asks that recur": typed quota errors)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.access.limits import GIB, Ask, Limits, Use, refuse, refuse_exec
from perdure.core.errors import QuotaExceeded

COUNTS = st.integers(0, 20)


def refused(limits: Limits, use: Use, ask: Ask) -> QuotaExceeded:
    with pytest.raises(QuotaExceeded) as caught:
        refuse(limits, use, ask)
    return caught.value


@given(COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS)
def test_what_is_admitted_fits_and_what_is_refused_does_not(
    limit: int, memory_limit: int, used: int, memory: int, asked: int, asked_memory: int
) -> None:
    limits = Limits(workspaces=limit, memory_awake_mib=memory_limit)
    fits = (asked == 0 or used + asked <= limit) and (asked_memory == 0 or memory + asked_memory <= memory_limit)
    try:
        refuse(limits, Use(used, memory), Ask(asked, asked_memory))
    except QuotaExceeded:
        assert not fits
    else:
        assert fits


def test_without_limits_everything_fits() -> None:
    refuse(Limits(), Use(10**6, 10**9, 10**15), Ask(10**6, 10**9, 10**15))


def test_too_many_workspaces_wait_for_a_deletion() -> None:
    error = refused(Limits(workspaces=3), Use(workspaces=2), Ask(workspaces=2, memory_mib=512))
    assert error.message == "The tenant has 2 of 3 workspaces, and 2 more would be too many."
    assert error.details == {"quota": "workspaces", "limit": "3", "used": "2", "asked": "2"}
    assert (error.code, error.status, error.retryable, error.ambiguous) == ("quota_exceeded", 429, False, False)
    assert "perdure rm" in error.hint


def test_too_much_memory_may_pass_by_itself_and_names_what_is_awake() -> None:
    use = Use(memory_awake_mib=3584, awake=tuple("abcdefg"))
    error = refused(Limits(memory_awake_mib=4096), use, Ask(memory_mib=1024))
    assert error.message == "This needs 1024 MiB awake, and 3584 of the tenant's 4096 MiB are in use by a, b, c, d, e."
    assert error.details["awake"] == "a, b, c, d, e"
    assert error.retryable
    never = refused(Limits(memory_awake_mib=512), Use(), Ask(memory_mib=1024))
    assert not never.retryable
    assert never.message == "This needs 1024 MiB awake, and 0 of the tenant's 512 MiB are in use."


@pytest.mark.parametrize(
    ("used", "asked", "fits"),
    [(0, 0, True), (GIB - 1, 0, True), (GIB - 1, 1, True), (GIB - 1, 2, False), (GIB, 0, False), (5 * GIB, 0, False)],
)
def test_storage_at_its_limit_stops_all_that_could_add_to_it(used: int, asked: int, fits: bool) -> None:
    limits, use = Limits(storage_gib=1.0), Use(storage_bytes=used)
    if fits:
        refuse(limits, use, Ask(storage_bytes=asked))
        return
    error = refused(limits, use, Ask(storage_bytes=asked))
    assert error.details["quota"] == "storage_gib"
    assert "falls asleep with all its work" in error.hint
    assert not error.retryable


@pytest.mark.parametrize(("limit", "running", "fits"), [(2, 1, True), (2, 2, False), (2, 9, False), (0, 0, False)])
def test_commands(limit: int, running: int, fits: bool) -> None:
    if fits:
        refuse_exec(limit, running)
        return
    with pytest.raises(QuotaExceeded) as caught:
        refuse_exec(limit, running)
    expected: dict[str, Any] = {"quota": "execs", "limit": str(limit), "used": str(running), "asked": "1"}
    assert (caught.value.details, caught.value.retryable) == (expected, limit > 0)
