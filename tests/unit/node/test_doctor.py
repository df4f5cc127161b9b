"""What the doctor says of the jail is what workspaces get."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from perdure.machines.jail import JailKind, Verdict
from perdure.node.doctor import _jail, _readonly_base, _seccomp, _soft_dirty
from perdure.wire.public import CheckStatus

BOTH = Verdict((JailKind.OWN_USER, JailKind.PLAIN))
PLAIN = Verdict((JailKind.PLAIN,), own_user_missing="setpriv is missing")


@pytest.mark.parametrize(
    ("verdict", "version", "said"),
    [
        (BOTH, (10, 0, 2), ", own user"),
        (BOTH, (7, 2, 22), "; no own user: QEMU before 8.2 opens"),
        (PLAIN, (10, 0, 2), "; no own user: setpriv is missing"),
        (PLAIN, (7, 2, 22), "; no own user: setpriv is missing"),
    ],
)
async def test_an_own_user_is_promised_only_where_machines_get_one(
    verdict: Verdict, version: tuple[int, int, int], said: str
) -> None:
    class Driver:
        async def jail_verdict(self) -> Verdict:
            return verdict

        async def identity(self, _accelerator: object) -> Any:
            return SimpleNamespace(version=version)

    check = await _jail(cast("Any", Driver()))
    assert check.status is CheckStatus.OK
    assert check.detail.startswith(f"bubblewrap: own namespaces, no network{said}")


@pytest.mark.parametrize(("version", "status"), [((8, 2, 0), CheckStatus.OK), ((7, 2, 22), CheckStatus.WARN)])
async def test_the_shared_memory_image_is_read_only_since_qemu_8_2(version: tuple[int, int, int], status: CheckStatus) -> None:
    class Driver:
        async def identity(self, _accelerator: object) -> Any:
            return SimpleNamespace(version=version)

    check = await _readonly_base(cast("Any", Driver()))
    assert (check.name, check.status, bool(check.hint)) == ("readonly base", status, status is CheckStatus.WARN)


@pytest.mark.parametrize(("there", "status"), [(True, CheckStatus.OK), (False, CheckStatus.WARN)])
def test_a_kernel_without_system_call_filters_is_told(
    there: bool, status: CheckStatus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.node.doctor._SECCOMP", tmp_path if there else tmp_path / "none")
    assert _seccomp().status is status


@pytest.mark.parametrize(("works", "status"), [(True, CheckStatus.OK), (False, CheckStatus.WARN)])
def test_a_kernel_that_does_not_tell_writes_is_told(works: bool, status: CheckStatus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.machines.softdirty.works", lambda: works)
    check = _soft_dirty()
    assert (check.name, check.status, bool(check.hint)) == ("soft-dirty", status, not works)


def test_a_doctor_without_a_server_loads_none() -> None:
    """Loading one took longer than all checks."""
    heavy = ("perdure.wiring", "perdure.api", "perdure.workspaces", "perdure.backup", "fastapi", "psycopg", "alembic")
    program = f"import sys, perdure.fitness; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
