"""Golden snapshots: an image booted once per (size, VMM), warmed up, and captured.

Its RAM file is the base that every workspace of that image and size maps privately (DESIGN D2), so here the machine maps it
shared and its writes reach the file. The file is then copied without its zero pages: they stay holes, cost nothing and read as
zeros. A golden is made in a temporary directory and takes its place by one rename; of several processes that want the same one,
one makes it and the others find it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from perdure.core import files
from perdure.core.errors import MachineFailed
from perdure.images.model import Golden, Image
from perdure.images.progress import Progress, ProgressSink, Step, silent
from perdure.images.recipe import check_size
from perdure.images.registry import ImageStore, golden_to_json, load_golden
from perdure.images.sparse import copy_without_zeros, file_facts
from perdure.machines.driver import (
    Accelerator,
    DiskChain,
    DiskLayer,
    EventKind,
    LaunchSpec,
    Limits,
    Machine,
    MachineDriver,
    Ram,
)
from perdure.machines.fingerprint import GuestFacts, fingerprint, fingerprint_parts
from perdure.machines.guestlink import GuestLink
from perdure.snapshots.layers import create_layer
from perdure.wire.node import MachineSize

_STILL_TRIES = 5
_STILL_S = 2.0


@dataclass(frozen=True, slots=True)
class GoldenSpec:
    """What a golden snapshot is made of and with. Deadlines are generous: an emulated guest on a busy host is slow."""

    image: Image
    size: MachineSize
    store: ImageStore
    driver: MachineDriver
    accelerator: Accelerator
    run_root: Path  # the machine's run directory is made below it
    progress: ProgressSink = silent
    hello_deadline_s: float = 240.0
    warm_up_deadline_s: float = 600.0  # a browser's first start, emulated, on a host that does other things too


async def golden_parts(spec: GoldenSpec) -> dict[str, str]:
    """Parts of the fingerprint that a machine of this image and size has here and now."""
    identity = await spec.driver.identity(spec.accelerator)
    facts = GuestFacts(spec.image.kernel_digest, spec.image.agent_protocol)
    parts = fingerprint_parts(identity, spec.accelerator, spec.image.shape(spec.size), facts)
    if spec.image.boot_directory is not None:  # its own agent disk goes by the image's digest, which snapshots name
        parts["agent_release"] = spec.image.agent_release[:16]
    return parts


async def find_golden(spec: GoldenSpec) -> Golden | None:
    """The golden that fits this VMM, if it has been made."""
    path = spec.image.directory / "golden" / _directory_name(spec.size, fingerprint(await golden_parts(spec)))
    return load_golden(path) if (path / "golden.json").is_file() else None


async def ensure_golden(spec: GoldenSpec) -> Golden:
    """The golden of (image, size) for this VMM, made when there is none.

    Raises InvalidRequest for a size that cannot boot, MachineFailed with the console's last lines when the guest does not come up
    or a warm-up command cannot run, NoSpace, HostUnfit. Whatever interrupts it leaves nothing.
    """
    check_size(spec.size)
    found = await find_golden(spec)
    if found is not None:
        return found
    mark = fingerprint(await golden_parts(spec))
    name = _directory_name(spec.size, mark)
    waits = Progress(Step.WAITING, f"Somebody else boots {spec.image.name} with {spec.size.memory_mib} MiB")
    async with spec.store.only_one(f"golden-{spec.image.digest[:16]}-{name}", lambda: spec.progress(waits)):
        final = spec.image.directory / "golden" / name
        if not (final / "golden.json").is_file():
            with spec.store.scratch("golden", spec.image.directory / "golden") as scratch:
                await _make(spec, mark, scratch, final)
        return load_golden(final)


def _directory_name(size: MachineSize, mark: str) -> str:
    return f"{size.memory_mib}m{size.vcpus}c-{mark[:16]}"


async def _make(spec: GoldenSpec, mark: str, scratch: Path, final: Path) -> None:
    output = scratch / "golden"
    output.mkdir()
    boot_s = await _boot_and_capture(spec, scratch, output)
    await asyncio.to_thread(_finish, spec, mark, scratch, boot_s)
    await asyncio.to_thread(files.publish_dir, output, final)


async def _boot_and_capture(spec: GoldenSpec, scratch: Path, output: Path) -> float:
    """Boot on ``scratch/ram`` and ``output/disk.qcow2``, warm up, write ``output/devices.state``. Returns the boot's seconds."""
    image, size = spec.image, spec.size
    ram, disk = scratch / "ram", output / "disk.qcow2"
    with ram.open("xb") as file:
        file.truncate(size.memory_mib << 20)
    create_layer(disk, image.disk_gib << 30)
    name = f"golden-{os.urandom(4).hex()}"
    launch = LaunchSpec(
        name=name,
        run_dir=spec.run_root / name,
        shape=image.shape(size),
        ram=Ram(ram, shared=True),
        accelerator=spec.accelerator,
        limits=Limits(),
    )
    files.make_dir(spec.run_root)
    spec.progress(Progress(Step.GOLDEN_BOOT, f"Booting {image.name} with {size.memory_mib} MiB"))
    started = time.monotonic()
    machine = await spec.driver.boot(launch, DiskChain((image.root, DiskLayer(disk, "qcow2"))))
    try:
        async with _failing_with(machine), _linked(machine, spec) as link:
            boot_s = time.monotonic() - started
            spec.progress(Progress(Step.GOLDEN_WARM_UP, f"Running {len(image.warm_up)} commands"))
            await link.settle(image.warm_up, deadline_s=spec.warm_up_deadline_s)
            spec.progress(Progress(Step.GOLDEN_CAPTURE, "Capturing memory, devices and disk"))
            await _stand_still(link, image.name)
            await machine.pause()
            await machine.save_devices(output / "devices.state")
    finally:
        await machine.kill()
    return boot_s


async def _stand_still(link: GuestLink, name: str) -> None:
    """Every workspace of the image begins where its golden ends. Raises MachineFailed when what the warm-up left goes on
    working."""
    for _ in range(_STILL_TRIES):
        if await link.quiesce(_STILL_S):
            return
        await link.thaw()
    raise MachineFailed(
        f"What the warm-up of {name} left running does not stand still, so its memory cannot be captured.",
        hint="Let each command of the recipe's warm_up end what it starts.",
    )


@asynccontextmanager
async def _linked(machine: Machine, spec: GoldenSpec) -> AsyncIterator[GuestLink]:
    link = GuestLink(machine.connect)
    try:
        await link.open(spec.hello_deadline_s)
        yield link
    finally:
        await link.close()


@asynccontextmanager
async def _failing_with(machine: Machine) -> AsyncIterator[None]:
    """End the body when the machine ends by itself, and explain every failure with the console's last lines."""
    task = asyncio.current_task()
    assert task is not None
    ended: list[str] = []

    async def watch() -> None:
        async for event in machine.events():
            if event.kind in (EventKind.EXITED, EventKind.PANIC, EventKind.RESET, EventKind.POWEROFF, EventKind.NO_SPACE):
                ended.append(event.kind.value)
                task.cancel()
                return

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not ended:
            raise
        task.uncancel()
        raise MachineFailed(_with_console(f"The machine stopped while its image was booted ({ended[0]}).", machine)) from None
    except MachineFailed as error:
        raise MachineFailed(_with_console(error.message, machine), hint=_HINT, internal=error.internal) from error
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher


_HINT = "Give the machine more memory, or correct the recipe's warm_up; 'perdure doctor' says whether this host can run machines."


def _with_console(sentence: str, machine: Machine) -> str:
    console = getattr(machine, "console", None)
    lines = console().strip().splitlines()[-12:] if console is not None else []
    return sentence + ("\nThe console ends with:\n" + "\n".join(lines) if lines else "")


def _finish(spec: GoldenSpec, mark: str, scratch: Path, boot_s: float) -> None:
    output = scratch / "golden"
    base = output / "ram.base"
    copy_without_zeros(scratch / "ram", base)
    (scratch / "ram").unlink()
    for path in (base, output / "devices.state", output / "disk.qcow2"):
        path.chmod(0o444)
    facts = {path.name: file_facts(path) for path in sorted(output.iterdir())}
    golden = Golden(
        image=spec.image.digest,
        size=spec.size,
        directory=output,
        fingerprint=mark,
        base_id=facts["ram.base"]["sha256"],
        boot_s=round(boot_s, 3),
        created_at=datetime.now(UTC),
        ram_bytes=spec.size.memory_mib << 20,
        ram_stored_bytes=files.stored_bytes(base),
    )
    files.create_file(output / "golden.json", golden_to_json(golden, facts), mode=0o444)
