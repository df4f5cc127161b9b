"""What is said of a host before any machine runs there."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.machines import jail, qemu_host
from perdure.machines.driver import Accelerator
from perdure.machines.jail import JailKind, Verdict
from perdure.machines.qemu_host import WRITABLE_BASE, foresee
from perdure.wire.node import Isolation

BOTH = Verdict((JailKind.OWN_USER, JailKind.PLAIN))
NONE = Verdict((JailKind.NONE,), "no bubblewrap", "no bubblewrap")
NEW, OLD = (10, 0, 2), (7, 2, 22)


@pytest.fixture(autouse=True)
def filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel with system call filters; without the file, one that has none."""
    path = tmp_path / "actions_avail"
    path.write_text("kill\n")
    monkeypatch.setattr(qemu_host, "SYSTEM_CALL_FILTERS", path)
    return path


def test_on_a_host_that_has_everything_everything_holds() -> None:
    held = foresee(Accelerator.TCG, BOTH, {}, NEW)
    assert (held.isolation, held.missing) == (Isolation.VM_EMULATED, {})
    assert held.jail and held.seccomp and held.own_user and held.readonly_base
    assert held.memory_limit and held.cpu_limit and held.pids_limit


@pytest.mark.parametrize(
    ("verdict", "limits", "version", "missing"),
    [
        (BOTH, {}, OLD, {"own_user": WRITABLE_BASE, "readonly_base": "needs QEMU 8.2 or later"}),
        (Verdict((JailKind.OWN_USER,)), {}, OLD, {"jail", "own_user", "readonly_base"}),
        (Verdict((JailKind.PLAIN,), own_user_missing="not root"), {}, NEW, {"own_user": "not root"}),
        (NONE, {}, NEW, {"jail": "no bubblewrap", "own_user": "no bubblewrap"}),
        (BOTH, {"cpu": "not mounted", "pids": "read-only"}, NEW, {"cpu_limit": "not mounted", "pids_limit": "read-only"}),
    ],
)
def test_what_is_missing_is_named_with_its_reason(
    verdict: Verdict, limits: dict[str, str], version: tuple[int, int, int], missing: dict[str, str] | set[str]
) -> None:
    held = foresee(Accelerator.TCG, verdict, limits, version)
    assert (held.missing if isinstance(missing, dict) else set(held.missing)) == missing
    assert all(held.missing.values())
    assert {name for name in missing if getattr(held, name)} == set()


def test_a_kernel_without_filters_is_told(filters: Path) -> None:
    filters.unlink()
    held = foresee(Accelerator.TCG, BOTH, {}, NEW)
    assert not held.seccomp and set(held.missing) == {"seccomp"}


@pytest.mark.parametrize("usable", [True, False])
def test_an_own_user_needs_a_kvm_that_it_may_open(usable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jail, "kvm_for_everybody_or_a_group", lambda: usable)
    held = foresee(Accelerator.KVM, BOTH, {}, NEW)
    assert (held.isolation, held.own_user, held.jail) == (Isolation.VM_HARDWARE, usable, True)
