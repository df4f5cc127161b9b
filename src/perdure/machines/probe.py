"""Which accelerator works here: found out by booting the image's own kernel, never by asking a device.

On some hosts ``/dev/kvm`` opens, answers and even creates a machine, and every stock kernel then hangs. So KVM has proved itself
when a guest under it has said something within a deadline. The verdict is kept per (QEMU build, kernel, boot of the host): any
of them may change it. TCG works wherever QEMU starts, so it is not tried.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from perdure.core import files
from perdure.core.errors import HostUnfit, PerdureError
from perdure.machines.driver import Accelerator, DiskChain, LaunchSpec, Limits, Machine, MachineDriver, Ram, Shape

PROBE_DEADLINE_S = 10.0
KVM_DEVICE = Path("/dev/kvm")
#: Memory of the machine that is tried; the kernel's own minimum with some room.
PROBE_MEMORY_MIB = 256

#: How many verdicts the cache holds: of several VMMs on one host, and of hosts that share their images.
VERDICTS_KEPT = 8

Alive = Callable[[Machine], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One accelerator that was considered, for ``perdure doctor``. ``reason`` is a sentence also when it works."""

    accelerator: Accelerator
    works: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accelerator to use and how it was chosen, best candidates first."""

    accelerator: Accelerator
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class ProbeSpec:
    """What is booted: the image's files on a throw-away layer. ``directory`` is made, used and removed."""

    shape: Shape
    disk: DiskChain
    directory: Path
    cache: Path  # file that keeps verdicts
    deadline_s: float = PROBE_DEADLINE_S


async def choose(setting: Literal["auto", "kvm", "tcg"], driver: MachineDriver, spec: ProbeSpec, alive: Alive) -> Verdict:
    """Decide; ``alive`` tells whether a booted guest speaks. Raises HostUnfit when KVM is demanded and does not work here."""
    if setting == "tcg":
        return Verdict(Accelerator.TCG, (Attempt(Accelerator.TCG, True, "It is set (PERDURE_ACCELERATOR=tcg)."),))
    kvm = await _judge_kvm(driver, spec, alive)
    if kvm.works:
        return Verdict(Accelerator.KVM, (kvm,))
    if setting == "kvm":
        raise HostUnfit(
            f"KVM is demanded but does not work here: {kvm.reason}",
            hint="Set PERDURE_ACCELERATOR=auto to run without it, slower and with weaker isolation.",
        )
    return Verdict(Accelerator.TCG, (kvm, Attempt(Accelerator.TCG, True, "Emulation works wherever QEMU starts.")))


async def _judge_kvm(driver: MachineDriver, spec: ProbeSpec, alive: Alive) -> Attempt:
    obstacle = kvm_obstacle(KVM_DEVICE)
    if obstacle:
        return Attempt(Accelerator.KVM, False, obstacle)
    key = await _cache_key(driver, spec.shape.kernel)
    known = _read_cache(spec.cache).get(key)
    if known is not None:
        return Attempt(Accelerator.KVM, known["works"], known["reason"])
    attempt = await _try(driver, spec, alive)
    _write_cache(spec.cache, key, attempt)
    return attempt


def kvm_obstacle(device: Path) -> str:
    """Why KVM cannot even be tried; empty when it can."""
    if not device.exists():
        return f"There is no {device}: this host offers no hardware virtualisation."
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except PermissionError:
        return f"{device} may not be opened by this user; add it to the group kvm (usermod -aG kvm USER)."
    except OSError as error:
        return f"{device} cannot be opened: {error.strerror}."
    return ""


async def _try(driver: MachineDriver, spec: ProbeSpec, alive: Alive) -> Attempt:
    """Boot under KVM until the guest speaks."""
    shape = replace(spec.shape, memory_mib=min(spec.shape.memory_mib, PROBE_MEMORY_MIB), vcpus=1)
    spec.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    ram = spec.directory / "ram"
    try:
        with ram.open("wb") as file:
            file.truncate(shape.memory_mib << 20)
        ram.chmod(0o444)
        launch = LaunchSpec("probe", spec.directory / "probe", shape, Ram(ram), Accelerator.KVM, Limits())
        try:
            machine = await driver.boot(launch, spec.disk)
        except PerdureError as error:
            return Attempt(Accelerator.KVM, False, f"A machine under KVM does not start: {error.message}")
        try:
            return await _watch(machine, spec.deadline_s, alive)
        finally:
            await machine.kill()
    finally:
        shutil.rmtree(spec.directory, ignore_errors=True)


async def _watch(machine: Machine, deadline_s: float, alive: Alive) -> Attempt:
    hangs = f"The kernel was started under KVM and said nothing for {deadline_s:g} seconds."
    try:
        async with asyncio.timeout(deadline_s):
            works = await alive(machine)
    except TimeoutError:
        return Attempt(Accelerator.KVM, False, hangs)
    except (PerdureError, OSError, EOFError) as error:
        return Attempt(Accelerator.KVM, False, f"The machine under KVM broke: {error}")
    return Attempt(Accelerator.KVM, works, "The image's kernel booted under KVM." if works else hangs)


# ---------------------------------------------------------------------------------------------------------------------- cache


async def _cache_key(driver: MachineDriver, kernel: Path) -> str:
    identity = await driver.identity(Accelerator.KVM)
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    digest = await asyncio.to_thread(_digest, kernel)
    return hashlib.sha256(f"{identity.build}\n{identity.cpu_model}\n{digest}\n{boot_id}".encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_cache(path: Path) -> dict[str, dict[str, Any]]:
    """Verdicts by key; a file that cannot be read is an empty one, because a verdict can be found again."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, dict) and {"works", "reason"} <= value.keys()}


def _write_cache(path: Path, key: str, attempt: Attempt) -> None:
    """The newest verdicts: those of older builds and boots are of no use any more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    older = {known: verdict for known, verdict in _read_cache(path).items() if known != key}
    newest = [*older.items(), (key, asdict(attempt))][-VERDICTS_KEPT:]
    files.write_file(path, json.dumps(dict(newest)).encode())
