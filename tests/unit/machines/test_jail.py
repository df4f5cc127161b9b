"""How a VMM is wrapped, and how a jail that does not work is explained."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.core.errors import HostUnfit
from perdure.machines import jail
from perdure.machines.driver import Accelerator, LaunchSpec, Ram, Shape
from perdure.machines.jail import Jail, JailKind, Verdict
from perdure.machines.qemu_host import choose_jail

TRUE = Path("/usr/bin/true")


def wrapped(kind: JailKind, **options: bool) -> list[str]:
    return jail.wrap(Jail(kind, (Path("/opt/qemu"),), **options), ["qemu", "-S"], info_fd=5, block_fd=6)


def test_every_namespace_and_no_host_directory() -> None:
    words = wrapped(JailKind.PLAIN)
    assert words[0] == "bwrap"
    for name in ("user", "pid", "ipc", "uts", "net"):
        assert f"--unshare-{name}" in words
    assert {"--die-with-parent", "--as-pid-1"} <= set(words)
    assert words[-3:] == ["--", "qemu", "-S"]
    bound = [words[i + 1] for i, word in enumerate(words) if word == "--ro-bind"]
    assert set(bound) <= {"/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/opt/qemu"}
    assert "--bind" not in words
    assert "--dev-bind" not in words


def test_its_own_user_is_taken_before_the_jail_is_made() -> None:
    words = wrapped(JailKind.OWN_USER)
    assert words[: words.index("bwrap")] == [
        *("setpriv", "--reuid", str(jail.VMM_UID), "--regid", str(jail.VMM_UID)),
        *("--clear-groups", "--pdeathsig", "KILL", "--"),
    ]


def test_the_capability_for_older_qemus_stays_in_a_user_namespace() -> None:
    words = wrapped(JailKind.PLAIN, override_modes=True)
    assert words[words.index("--cap-add") + 1] == "CAP_DAC_OVERRIDE"
    assert "--unshare-user" in words
    assert "--cap-add" not in wrapped(JailKind.PLAIN)


def test_kvm_is_visible_only_when_used() -> None:
    words = wrapped(JailKind.PLAIN, kvm=True)
    assert words[words.index("--dev-bind") + 1] == "/dev/kvm"


@pytest.mark.parametrize(
    ("mode", "group", "usable", "passed"),
    [(0o600, 0, False, False), (0o660, 0, False, False), (0o660, 106, True, True), (0o666, 0, True, False)],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to a group")
def test_the_group_of_the_device_is_passed_on_but_never_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, group: int, usable: bool, passed: bool
) -> None:
    device = tmp_path / "kvm"
    device.write_bytes(b"")
    os.chown(device, 0, group)
    device.chmod(mode)
    monkeypatch.setattr(jail, "KVM_DEVICE", device)
    assert jail.kvm_for_everybody_or_a_group() == usable
    words = wrapped(JailKind.OWN_USER, kvm=True)
    assert ("--groups" in words) == passed
    choice = choose_jail(replace(spec(tmp_path), accelerator=Accelerator.KVM), (10, 0, 2), BOTH)
    assert (choice.kind is JailKind.OWN_USER) == usable


def test_without_a_jail_the_vmm_still_dies_with_its_parent() -> None:
    assert wrapped(JailKind.NONE) == ["setpriv", "--pdeathsig", "KILL", "--no-new-privs", "--", "qemu", "-S"]


async def test_off_is_said_to_be_off() -> None:
    verdict = await jail.judge("off", TRUE, ())
    assert verdict.kinds == (JailKind.NONE,)
    assert "PERDURE_JAIL=off" in verdict.jail_missing


async def test_a_missing_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jail.shutil, "which", lambda name: None)
    verdict = await jail.judge("auto", TRUE, ())
    assert verdict.kinds == (JailKind.NONE,)
    assert "apt-get install" in verdict.jail_missing
    with pytest.raises(HostUnfit, match="bubblewrap is not installed"):
        await jail.judge("require", TRUE, ())


async def test_a_program_that_cannot_start_in_the_jail_is_the_reason() -> None:
    verdict = await jail.judge("auto", Path("/usr/bin/no-such-qemu"), ())
    assert verdict.kinds == (JailKind.NONE,)
    assert "No such file" in verdict.jail_missing


def spec(directory: Path, *, shared: bool = False, mode: int = 0o444) -> LaunchSpec:
    for name in ("ram", "kernel", "initrd", "agent"):
        (directory / name).write_bytes(b"")
        (directory / name).chmod(mode)
    shape = Shape(directory / "kernel", directory / "initrd", directory / "agent", 1, 1, 1 << 20)
    return LaunchSpec("m1", directory / "run" / "m1", shape, Ram(directory / "ram", shared), Accelerator.TCG)


BOTH = Verdict((JailKind.OWN_USER, JailKind.PLAIN))


def test_the_best_jail_is_chosen(tmp_path: Path) -> None:
    assert choose_jail(spec(tmp_path), (10, 0, 2), BOTH).kind is JailKind.OWN_USER


@pytest.mark.parametrize(
    ("options", "version", "reason"),
    [({}, (7, 2, 22), "before 8.2"), ({"shared": True}, (10, 0, 2), "golden"), ({"mode": 0o600}, (10, 0, 2), "not readable")],
)
def test_why_there_is_no_own_user(tmp_path: Path, options: dict[str, int], version: tuple[int, int, int], reason: str) -> None:
    choice = choose_jail(spec(tmp_path, **options), version, BOTH)  # type: ignore[arg-type]
    assert choice.kind is JailKind.PLAIN
    assert reason in choice.own_user_missing
    assert choice.jail_missing == ""


def test_a_host_with_the_own_user_jail_only(tmp_path: Path) -> None:
    choice = choose_jail(spec(tmp_path, shared=True), (10, 0, 2), Verdict((JailKind.OWN_USER,)))
    assert choice.kind is JailKind.NONE
    assert choice.jail_missing


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_both_jails_are_tried_as_root() -> None:
    verdict = await jail.judge("auto", TRUE, ())
    assert verdict.kinds or verdict.jail_missing
    assert (JailKind.OWN_USER in verdict.kinds) == (verdict.own_user_missing == "")
