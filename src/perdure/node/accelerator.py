"""KVM or TCG for this node: the probe, with the image's own kernel and the agent's handshake as its proof of life."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from perdure.core.config import Settings
from perdure.core.files import make_dir, remove_tree
from perdure.images.model import Image
from perdure.images.registry import ImageStore
from perdure.machines import probe
from perdure.machines.driver import Accelerator, DiskChain, DiskLayer, Machine, MachineDriver
from perdure.machines.guestlink import GuestLink
from perdure.snapshots.layers import create_layer

NO_IMAGE = "No image has been built yet, and only booting one proves that KVM works here."


async def choose(settings: Settings, driver: MachineDriver, images: ImageStore) -> probe.Verdict:
    """What the operator said, or what the probe finds with the first image there is. Raises HostUnfit."""
    if settings.accelerator == "tcg":
        return probe.Verdict(Accelerator.TCG, (probe.Attempt(Accelerator.TCG, True, "It is set (PERDURE_ACCELERATOR=tcg)."),))
    found = await asyncio.to_thread(images.all)
    if not found:
        attempts = (probe.Attempt(Accelerator.KVM, False, NO_IMAGE), probe.Attempt(Accelerator.TCG, True, "It works everywhere."))
        return probe.Verdict(Accelerator.TCG, attempts)
    return await _probe(settings, driver, found[0])


async def _probe(settings: Settings, driver: MachineDriver, image: Image) -> probe.Verdict:
    directory = settings.run_dir / f"probe-{os.getpid()}"
    layer = directory / "disk.qcow2"
    make_dir(directory, mode=0o700)
    try:
        create_layer(layer, image.disk_gib << 30)
        spec = probe.ProbeSpec(
            shape=image.shape(image.default_size),
            disk=DiskChain((image.root, DiskLayer(layer, "qcow2"))),
            directory=directory / "machine",
            cache=_cache(settings),
        )
        return await probe.choose(settings.accelerator, driver, spec, _answers)
    finally:
        remove_tree(directory)


def _cache(settings: Settings) -> Path:
    """Beside the images, for all homes that use them: a verdict is about this host and their kernel. In the home where the
    images are not ours to write."""
    place = settings.images if os.access(settings.images, os.W_OK) else settings.home
    return place / "accelerator.json"


async def _answers(machine: Machine) -> bool:
    """Only the agent's handshake proves that a guest runs."""
    link = GuestLink(machine.connect)
    try:
        await link.open(probe.PROBE_DEADLINE_S * 2)  # the probe's own deadline ends it first
    finally:
        await link.close()
    return True
