"""What this node starts machines from: images, their goldens for this VMM, and the launch specs of both."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

from perdure.core.errors import CorruptSnapshot
from perdure.images.golden import GoldenSpec, ensure_golden, golden_parts
from perdure.images.model import Golden, Image
from perdure.images.registry import ImageStore
from perdure.machines.driver import Accelerator, LaunchSpec, Limits, MachineDriver, Ram
from perdure.machines.fingerprint import fingerprint
from perdure.snapshots.capture import Base
from perdure.snapshots.manifest import BaseRef, Manifest
from perdure.snapshots.pagelog import BaseRam
from perdure.wire.node import MachineSize

#: A VMM's own memory beside the guest's: translation cache, device buffers, QEMU itself.
VMM_OVERHEAD_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Origin:
    """An image at a size, with the golden snapshot that fits this host's VMM."""

    image: Image
    size: MachineSize
    golden: Golden
    fingerprint: str
    fingerprint_parts: dict[str, str]

    @property
    def key(self) -> tuple[str, str]:
        """Names the warm machines that can become a workspace of this origin."""
        return (self.image.digest, self.golden.ref)


class Goldens:
    """Finds and makes origins; remembers them, because a wake should not read four JSON files."""

    def __init__(self, images: ImageStore, driver: MachineDriver, accelerator: Accelerator, run_root: Path) -> None:
        self.images = images
        self.driver = driver
        self.accelerator = accelerator
        self._run_root = run_root
        self._origins: dict[tuple[str, MachineSize], Origin] = {}
        self._rams: dict[Path, BaseRam] = {}

    async def origin(self, digest: str, size: MachineSize) -> Origin:
        """The origin of an image at a size. A size without a golden boots once and is captured (seconds to a minute)."""
        known = self._origins.get((digest, size))
        if known is not None and known.golden.ram.is_file():
            return known
        image = await asyncio.to_thread(self.images.load, digest)
        spec = GoldenSpec(image, size, self.images, self.driver, self.accelerator, self._run_root)
        golden = await ensure_golden(spec)
        parts = await golden_parts(spec)
        origin = Origin(image, size, golden, fingerprint(parts), parts)
        self._origins[(digest, size)] = origin
        return origin

    def at(self, origin: Origin, golden_ref: str) -> Origin:
        """The same origin on an older golden, which a snapshot lies on. Raises CorruptSnapshot when that is gone."""
        if golden_ref == origin.golden.ref:
            return origin
        for golden in self.images.goldens(origin.image):
            if golden.ref == golden_ref:
                return Origin(origin.image, origin.size, golden, origin.fingerprint, origin.fingerprint_parts)
        raise CorruptSnapshot(
            f"The golden snapshot {golden_ref} of image {origin.image.digest[:12]}, which this snapshot lies on, is gone.",
            hint="Restore the node's image directory; without it the snapshot cannot be used.",
        )

    def base(self, origin: Origin, manifest: Manifest | None) -> Base:
        """What a run of this origin lies on; its disk may lie on an older golden than its memory."""
        image = origin.image
        ref = BaseRef(image.digest, origin.golden.ref)
        disk_ref = ref if manifest is None else manifest.disk_base
        below = origin.golden if disk_ref.golden is None else self.at(origin, disk_ref.golden).golden
        return Base(ram=self._ram(origin.golden.ram), ram_ref=ref, disks=below.disk(image), disk_ref=disk_ref)

    def launch(self, origin: Origin, prefix: str) -> LaunchSpec:
        name = f"{prefix}-{os.urandom(6).hex()}"
        memory_bytes = (origin.size.memory_mib << 20) + VMM_OVERHEAD_BYTES
        return LaunchSpec(
            name=name,
            run_dir=self._run_root / name,
            shape=origin.image.shape(origin.size),
            ram=Ram(origin.golden.ram),
            accelerator=self.accelerator,
            limits=Limits(memory_bytes=memory_bytes, cpus=float(origin.size.vcpus) + 1.0),
            disk_below=origin.golden.disk(origin.image),
        )

    def _ram(self, path: Path) -> BaseRam:
        """One mapping of each base in this process."""
        ram = self._rams.get(path)
        if ram is None:
            ram = self._rams[path] = BaseRam(path)
        return ram
