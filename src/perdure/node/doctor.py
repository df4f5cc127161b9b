"""What this host can do for workspaces, found out by trying, and the command that mends each lack."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Awaitable, Callable

from perdure.core import files
from perdure.core.config import Settings
from perdure.core.errors import PerdureError
from perdure.images.registry import ImageStore
from perdure.machines import cgroups, softdirty
from perdure.machines.driver import Accelerator
from perdure.machines.jail import JailKind
from perdure.machines.qemu import QemuDriver
from perdure.machines.qemu_args import readonly_base
from perdure.machines.qemu_host import SYSTEM_CALL_FILTERS, WRITABLE_BASE
from perdure.node import accelerator
from perdure.snapshots.objects.opening import Found, probe
from perdure.wire.public import CheckStatus, DoctorCheck, DoctorReport

#: Free space below which a warning is due: an image build needs about this much.
ROOM_BYTES = 4 << 30
_SECCOMP = SYSTEM_CALL_FILTERS
_SECCOMP_HINT = "VMMs may not start without them. Use a kernel with CONFIG_SECCOMP_FILTER, as Debian's."
_SOFT_DIRTY_HINT = "It matters for large workspaces only; a kernel with CONFIG_MEM_SOFT_DIRTY, as Debian's, tells it."
_APT = "apt-get install --no-install-recommends"
_BUILD_TOOLS = {"mmdebstrap": "mmdebstrap", "mkfs.ext4": "e2fsprogs"}


async def examine(settings: Settings, driver: QemuDriver, images: ImageStore) -> DoctorReport:
    """Every check, each with a sentence; ``ok`` when nothing failed."""
    checks: list[DoctorCheck] = []
    for check in (_qemu, _jail, _readonly_base):
        checks.append(await _guarded(check.__name__.strip("_").replace("_", " "), lambda check=check: check(driver)))  # type: ignore[misc]
    chosen = await _accelerator(settings, driver, images, checks)
    checks += [_seccomp(), _soft_dirty(), _cgroups(), _build_tools(), _room(settings), _images(images)]
    checks += await _store(settings)
    return DoctorReport(
        ok=all(check.status is not CheckStatus.FAIL for check in checks),
        isolation=None if chosen is None else chosen.isolation,
        host=_host(),
        checks=checks,
    )


async def _guarded(name: str, check: Callable[[], Awaitable[DoctorCheck]]) -> DoctorCheck:
    try:
        return await check()
    except PerdureError as error:
        return DoctorCheck(name=name, status=CheckStatus.FAIL, detail=error.message, hint=error.hint)


async def _qemu(driver: QemuDriver) -> DoctorCheck:
    identity = await driver.identity(Accelerator.TCG)
    version = ".".join(map(str, identity.version))
    return DoctorCheck(name="qemu", status=CheckStatus.OK, detail=f"QEMU {version}, machine {identity.machine}")


async def _jail(driver: QemuDriver) -> DoctorCheck:
    verdict = await driver.jail_verdict()
    if verdict.kinds[0] is JailKind.NONE:
        hint = f"{_APT} bubblewrap; where user namespaces are forbidden, run the server as root."
        return DoctorCheck(
            name="jail", status=CheckStatus.WARN, detail=f"VMMs run without a jail: {verdict.jail_missing}", hint=hint
        )
    lacks = verdict.own_user_missing
    if not lacks and not readonly_base((await driver.identity(Accelerator.TCG)).version):
        lacks = WRITABLE_BASE
    detail = "bubblewrap: own namespaces, no network" + (f"; no own user: {lacks}" if lacks else ", own user")
    return DoctorCheck(name="jail", status=CheckStatus.OK, detail=detail)


async def _readonly_base(driver: QemuDriver) -> DoctorCheck:
    name = "readonly base"
    if readonly_base((await driver.identity(Accelerator.TCG)).version):
        return DoctorCheck(name=name, status=CheckStatus.OK, detail="VMMs cannot write the memory image that workspaces share")
    detail = (
        "a VMM that was taken over could write the memory image that workspaces share: it is open for writing before QEMU 8.2"
    )
    return DoctorCheck(
        name=name, status=CheckStatus.WARN, detail=detail, hint="Install QEMU 8.2 or later, or name one: PERDURE_QEMU."
    )


async def _accelerator(
    settings: Settings, driver: QemuDriver, images: ImageStore, checks: list[DoctorCheck]
) -> Accelerator | None:
    """What workspaces will run on, with every attempt and why; None when nothing can run them."""
    if any(check.status is CheckStatus.FAIL for check in checks):
        return None
    try:
        verdict = await accelerator.choose(settings, driver, images)
    except PerdureError as error:
        checks.append(DoctorCheck(name="accelerator", status=CheckStatus.FAIL, detail=error.message, hint=error.hint))
        return None
    for attempt in verdict.attempts:
        status = CheckStatus.OK if attempt.works else CheckStatus.WARN
        checks.append(DoctorCheck(name=attempt.accelerator.value, status=status, detail=attempt.reason))
    return verdict.accelerator


def _seccomp() -> DoctorCheck:
    """Every VMM is told to filter its system calls, and does not start where it cannot (QEMU's ``-sandbox``)."""
    if _SECCOMP.exists():
        return DoctorCheck(
            name="seccomp", status=CheckStatus.OK, detail="each VMM's system calls are filtered, or it does not start"
        )
    return DoctorCheck(
        name="seccomp", status=CheckStatus.WARN, detail="this kernel has no system call filters", hint=_SECCOMP_HINT
    )


def _soft_dirty() -> DoctorCheck:
    """Without it a checkpoint's pause grows with all the memory that a workspace has of its own."""
    name = "soft-dirty"
    if softdirty.works():
        return DoctorCheck(name=name, status=CheckStatus.OK, detail="a checkpoint copies what was written since the last one")
    detail = "this kernel does not tell what is written: a checkpoint copies all that differs from the image"
    return DoctorCheck(name=name, status=CheckStatus.WARN, detail=detail, hint=_SOFT_DIRTY_HINT)


def _cgroups() -> DoctorCheck:
    missing = cgroups.limits_missing(f"doctor-{os.getpid()}")
    if not missing:
        return DoctorCheck(name="cgroups", status=CheckStatus.OK, detail="memory, cpu and pids of each VMM are limited")
    detail = "; ".join(f"no {name} limit: {why}" for name, why in missing.items())
    return DoctorCheck(
        name="cgroups", status=CheckStatus.WARN, detail=detail, hint="Run as root, or under systemd with Delegate=yes."
    )


def _build_tools() -> DoctorCheck:
    missing = [package for tool, package in _BUILD_TOOLS.items() if shutil.which(tool, path=_path()) is None]
    if missing:
        hint = f"{_APT} {' '.join(missing)}"
        return DoctorCheck(
            name="build tools", status=CheckStatus.WARN, detail=f"images cannot be built: no {', '.join(missing)}", hint=hint
        )
    return DoctorCheck(name="build tools", status=CheckStatus.OK, detail="images can be built")


def _path() -> str:
    """Debian keeps mkfs where a user's PATH may not look."""
    return os.pathsep.join((os.defpath, "/usr/sbin", "/sbin"))


def _room(settings: Settings) -> DoctorCheck:
    where = next(path for path in (settings.home, *settings.home.parents) if path.exists())
    free = files.free_bytes(where)
    status = CheckStatus.OK if free >= ROOM_BYTES else CheckStatus.WARN
    hint = "" if status is CheckStatus.OK else "Free some space, or set PERDURE_HOME to a larger disk."
    return DoctorCheck(name="storage", status=status, detail=f"{free >> 30} GiB free at {settings.home}", hint=hint)


def _images(images: ImageStore) -> DoctorCheck:
    try:
        names = images.names()
    except PerdureError as error:
        return DoctorCheck(name="images", status=CheckStatus.FAIL, detail=error.message, hint=error.hint)
    if not names:
        return DoctorCheck(name="images", status=CheckStatus.WARN, detail="none is built", hint="perdure image build")
    return DoctorCheck(name="images", status=CheckStatus.OK, detail=", ".join(sorted(names)))


async def _store(settings: Settings) -> list[DoctorCheck]:
    """Nothing where there is no object store: it is a choice, not a lack."""
    if settings.store_url is None:
        return []
    name = "object store"
    try:
        found = await probe(settings.store_url, settings.store_options)
    except PerdureError as error:
        return [DoctorCheck(name=name, status=CheckStatus.FAIL, detail=error.message, hint=error.hint)]
    if found is Found.STRANGE:
        detail = f"{settings.store_url} holds something, and nothing in it says which installation it belongs to"
        hint = "A server starts on it only if it finds its own uploads there. If not, use an empty bucket or prefix."
        return [DoctorCheck(name=name, status=CheckStatus.WARN, detail=detail, hint=hint)]
    used = "in use by an installation" if found is Found.CLAIMED else "empty"
    how = "sealed with a key of each tenant" if settings.store_encryption else "not encrypted by this server"
    return [DoctorCheck(name=name, status=CheckStatus.OK, detail=f"{settings.store_url} answers; {used}; {how}")]


def _host() -> dict[str, str]:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpus": str(os.cpu_count() or 1),
        "memory_mib": str(memory >> 20),
        "python": platform.python_version(),
        "user": "root" if os.geteuid() == 0 else "ordinary",
    }
