"""What the QEMU driver must know of its host: the binary and its build, the CPU, whether a machine fits, how it is confined."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from perdure.core.errors import HostUnfit, InvalidRequest, NotFound
from perdure.machines import cgroups, jail, process
from perdure.machines.driver import Accelerator, LaunchSpec
from perdure.machines.jail import JailKind, JailPolicy
from perdure.machines.qemu_args import readonly_base
from perdure.wire.node import Confinement

INSTALL_HINT = "Install it: apt-get install --no-install-recommends qemu-system-x86 qemu-utils (or set PERDURE_QEMU)."
OLDEST = (7, 2, 0)
QUERY_DEADLINE_S = 60.0
#: The frequency goes into the fingerprint; calibration differs a little from boot to boot of the host.
TSC_GRAIN_KHZ = 10_000
#: Why an older QEMU's machines, for all that the jail can do, run as the server's user.
WRITABLE_BASE = "QEMU before 8.2 opens the base memory for writing, which another user may not"
#: There when the kernel can filter system calls (seccomp(2)).
SYSTEM_CALL_FILTERS = Path("/proc/sys/kernel/seccomp/actions_avail")


@dataclass(frozen=True, slots=True)
class QemuConfig:
    """``qemu``: name or path; ``data_dir``: its firmware (-L) when that is not found by itself."""

    qemu: str = "qemu-system-x86_64"
    data_dir: Path | None = None
    jail: JailPolicy = "auto"


@dataclass(frozen=True, slots=True)
class Binary:
    """One QEMU, examined."""

    path: Path
    version: tuple[int, int, int]
    build: str
    machine: str
    system: tuple[Path, ...]  # directories outside /usr it is made of
    stamp: tuple[int, ...] = ()  # device, inode, size and mtime: an upgrade under a running server changes it

    def is_current(self) -> bool:
        """Whether the file at its path is still the one that was examined."""
        return stamp_of(self.path) == self.stamp


def stamp_of(path: Path) -> tuple[int, ...]:
    """Empty when there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def check_spec(spec: LaunchSpec) -> None:
    """Refuse what cannot work, before anything is made. Raises HostUnfit, NotFound or InvalidRequest."""
    wanted = spec.shape.memory_mib << 20
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if wanted > host:
        raise HostUnfit(
            f"A machine of {spec.shape.memory_mib} MiB does not fit into this host's {host >> 20} MiB of memory.",
            hint="Ask for less memory (--memory-mib).",
        )
    cpus = os.cpu_count() or 1
    if not 1 <= spec.shape.vcpus <= max(cpus, 1) * 4:
        raise InvalidRequest(
            f"{spec.shape.vcpus} vCPUs are not possible on this host's {cpus} CPUs.", hint=f"Ask for 1 to {cpus * 4}."
        )
    for path in (spec.ram.path, spec.shape.kernel, spec.shape.initrd, spec.shape.agent_disk):
        if not path.is_file():
            raise NotFound(f"{path.name} does not exist.", internal=str(path))
    size = spec.ram.path.stat().st_size
    if size != wanted:
        raise InvalidRequest(
            f"The memory file {spec.ram.path.name} has {size} bytes, but a machine of {spec.shape.memory_mib} MiB needs {wanted}."
        )


@dataclass(frozen=True, slots=True)
class JailChoice:
    """The jail of one start, and why a better one was not possible."""

    kind: JailKind
    jail_missing: str = ""
    own_user_missing: str = ""


def choose_jail(spec: LaunchSpec, version: tuple[int, int, int], verdict: jail.Verdict) -> JailChoice:
    """The best jail that this start can use."""
    return _best(verdict, _against_own_user(spec, version) if JailKind.OWN_USER in verdict.kinds else "")


def _best(verdict: jail.Verdict, against_own_user: str) -> JailChoice:
    if JailKind.OWN_USER not in verdict.kinds:
        return JailChoice(verdict.kinds[0], verdict.jail_missing, verdict.own_user_missing)
    if not against_own_user:
        return JailChoice(JailKind.OWN_USER)
    others = [kind for kind in verdict.kinds if kind is not JailKind.OWN_USER]
    if others:
        return JailChoice(others[0], own_user_missing=against_own_user)
    missing = "only the jail with its own user works here, and this machine cannot use it"
    return JailChoice(JailKind.NONE, missing, against_own_user)


def _against_own_user(spec: LaunchSpec, version: tuple[int, int, int]) -> str:
    if spec.ram.shared:
        return "this machine writes its memory to a file of the server's user, to make a golden snapshot"
    if not readonly_base(version):
        return WRITABLE_BASE
    for path in (spec.ram.path, spec.shape.kernel, spec.shape.initrd):
        if not path.stat().st_mode & 0o004:
            return f"{path.name} is not readable by other users"
    return _host_against_own_user(spec.accelerator, version)


def _host_against_own_user(accelerator: Accelerator, version: tuple[int, int, int]) -> str:
    """What speaks against it for any machine of workspaces."""
    if not readonly_base(version):
        return WRITABLE_BASE
    if accelerator is Accelerator.KVM and not jail.kvm_for_everybody_or_a_group():
        return "only root may open /dev/kvm on this host"
    return ""


def confinement(
    spec: LaunchSpec, choice: JailChoice, group: cgroups.Group, version: tuple[int, int, int], pid: int
) -> Confinement:
    """What holds for a VMM that runs; the system call filter is looked up in the kernel, not assumed."""
    seccomp = re.search(r"^Seccomp:\s*2$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE) is not None
    base = "the memory of a golden snapshot in the making is written" if spec.ram.shared else _against_readonly_base(version)
    return _stated(spec.accelerator, choice, group.missing, seccomp=seccomp, readonly_base_missing=base)


def foresee(
    accelerator: Accelerator, verdict: jail.Verdict, missing: Mapping[str, str], version: tuple[int, int, int]
) -> Confinement:
    """What will hold for the VMM of any workspace here. ``missing``: limits that cannot be set, and why."""
    choice = _best(verdict, _host_against_own_user(accelerator, version))
    base = _against_readonly_base(version)
    return _stated(accelerator, choice, missing, seccomp=SYSTEM_CALL_FILTERS.exists(), readonly_base_missing=base)


def _against_readonly_base(version: tuple[int, int, int]) -> str:
    return "" if readonly_base(version) else "needs QEMU 8.2 or later"


def _stated(
    accelerator: Accelerator, choice: JailChoice, limits: Mapping[str, str], *, seccomp: bool, readonly_base_missing: str
) -> Confinement:
    missing = {f"{controller}_limit": reason for controller, reason in limits.items()}
    if choice.jail_missing:
        missing["jail"] = choice.jail_missing
    if choice.own_user_missing:
        missing["own_user"] = choice.own_user_missing
    if not seccomp:
        missing["seccomp"] = "this QEMU runs without a system call filter"
    if readonly_base_missing:
        missing["readonly_base"] = readonly_base_missing
    return Confinement(
        isolation=accelerator.isolation,
        jail=choice.kind is not JailKind.NONE,
        seccomp=seccomp,
        own_user=choice.kind is JailKind.OWN_USER,
        memory_limit="memory" not in limits,
        cpu_limit="cpu" not in limits,
        pids_limit="pids" not in limits,
        readonly_base=not readonly_base_missing,
        missing=missing,
    )


# --------------------------------------------------------------------------------------------------------------------- host


async def examine(config: QemuConfig) -> Binary:
    found = shutil.which(config.qemu)
    if found is None:
        raise HostUnfit(f"QEMU is not installed: there is no {config.qemu}.", hint=INSTALL_HINT)
    path = Path(found).absolute()
    stamp = stamp_of(path)
    status, text = await process.run([str(path), "--version"], QUERY_DEADLINE_S)
    match = re.search(r"version (\d+)\.(\d+)\.(\d+)", text)
    if status != 0 or match is None:
        raise HostUnfit(f"{path} does not say its version: {text.splitlines()[-1] if text else status}", hint=INSTALL_HINT)
    version = (int(match[1]), int(match[2]), int(match[3]))
    if version < OLDEST:
        raise HostUnfit(f"QEMU {'.'.join(match.groups())} is too old; 7.2 or later is needed.", hint=INSTALL_HINT)
    _, machines = await process.run([str(path), "-M", "help"], QUERY_DEADLINE_S)
    alias = re.search(r"^q35\s.*\(alias of (\S+)\)", machines, re.MULTILINE)
    if alias is None:
        raise HostUnfit(f"{path} has no q35 machine; Perdure needs qemu-system-x86_64.", hint=INSTALL_HINT)
    digest = await asyncio.to_thread(_sha256, path)
    build = f"{text.splitlines()[0]} {digest[:16]}"
    return Binary(path, version, build, alias[1], _system_directories(path, config), stamp)


def _system_directories(binary: Path, config: QemuConfig) -> tuple[Path, ...]:
    """What of QEMU lies outside /usr: the tree of a binary that was unpacked elsewhere, and its data directory."""
    found = []
    resolved = binary.resolve()
    if Path("/usr") not in resolved.parents:
        found.append(resolved.parent.parent if resolved.parent.name == "bin" else resolved.parent)
    if config.data_dir and Path("/usr") not in config.data_dir.resolve().parents:
        found.append(config.data_dir.resolve())
    return tuple(found)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cpu_model(accelerator: Accelerator) -> str:
    """``max`` depends on the QEMU build alone. Under KVM a named model keeps snapshots movable between hosts of one make.

    Without "fast" string instructions: an emulator runs ``rep movsb`` byte by byte, and a guest that does not believe in them
    copies and clears memory word by word, three times as fast.
    """
    if accelerator is Accelerator.TCG:
        return "max,-erms,-fsrm"
    text = Path("/proc/cpuinfo").read_text()
    flags = set(re.findall(r"^flags\s*:(.*)$", text, re.MULTILINE)[0].split()) if "flags" in text else set()
    is_v3 = {"avx2", "bmi1", "bmi2", "fma", "movbe"} <= flags
    if "AuthenticAMD" in text:
        return "EPYC" if is_v3 else "Opteron_G3"
    return "Haswell-noTSX" if is_v3 else "Nehalem"


def tsc_khz() -> int | None:
    """The host's time stamp counter frequency, coarsely; None where the kernel does not tell."""
    cpufreq = Path("/sys/devices/system/cpu/cpu0/cpufreq")
    base = cpufreq / "base_frequency"
    if base.exists():
        khz = float(base.read_text())
    else:
        match = re.search(r"^cpu MHz\s*:\s*([0-9.]+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        # With frequency scaling this line is the current clock, not the counter's.
        if match is None or cpufreq.exists():
            return None
        khz = float(match[1]) * 1000
    return round(khz / TSC_GRAIN_KHZ) * TSC_GRAIN_KHZ
