"""What this node starts machines from: images, their goldens for this VMM, and the launch specs of both."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, replace
from pathlib import Path

from perdure.core.errors import CorruptSnapshot
from perdure.images.golden import GoldenSpec, ensure_golden, golden_parts
from perdure.images.model import Golden, Image
from perdure.images.modern import bootable
from perdure.images.registry import ImageStore, load_golden
from perdure.machines.driver import Accelerator, LaunchSpec, Limits, MachineDriver, Ram, VmmIdentity
from perdure.machines.fingerprint import fingerprint
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.capture import Base
from perdure.snapshots.manifest import BaseRef, Manifest
from perdure.wire.node import MachineSize

#: A VMM's own memory beside the guest's: translation cache, device buffers, QEMU itself.
VMM_OVERHEAD_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Origin:
    """An image at a size, with the golden snapshot that fits this host's VMM."""

    image: Image
    size: MachineSize
    golden: Golden
    vmm: VmmIdentity
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
        self._by_key: dict[tuple[str, str], Origin] = {}
        self._rams: dict[Path, BaseRam] = {}

    async def origin(self, digest: str, size: MachineSize) -> Origin:
        """The origin of an image at a size. A size without a golden boots once and is captured (seconds to a minute)."""
        identity = await self.driver.identity(self.accelerator)
        known = self._origins.get((digest, size))
        if known is not None and known.vmm == identity and known.golden.ram.is_file():
            return known
        image = await asyncio.to_thread(lambda: bootable(self.images, self.images.load(digest)))
        spec = GoldenSpec(image, size, self.images, self.driver, self.accelerator, self._run_root)
        golden = await ensure_golden(spec)
        parts = await golden_parts(spec)
        origin = Origin(image, size, golden, identity, fingerprint(parts), parts)
        self._origins[(digest, size)] = self._by_key[origin.key] = origin
        return origin

    def by_key(self, key: tuple[str, str]) -> Origin:
        """An origin that was handed out before."""
        return self._by_key[key]

    def lying_on(self, path: Path) -> set[str]:
        """Digests of images of which this file is a part, or of the agent release that they boot with."""
        images = [origin.image for origin in self._by_key.values()]
        theirs = {image.digest for image in images if image.boot_directory == path.parent}
        return theirs | ({path.parts[path.parts.index("blobs") + 1]} if "blobs" in path.parts else set())

    def superseded(self, origin: Origin) -> list[tuple[str, str]]:
        """Keys of other goldens of the same image and size: of another VMM build, or made again."""
        return [
            key
            for key, other in self._by_key.items()
            if (key[0], other.size) == (origin.image.digest, origin.size) and key != origin.key
        ]

    def at(self, origin: Origin, golden_ref: str) -> Origin:
        """The same origin on an older golden, which a snapshot lies on. Raises CorruptSnapshot when that is gone."""
        if golden_ref == origin.golden.ref:
            return origin
        for golden in self.images.goldens(origin.image):
            if golden.ref == golden_ref:
                older = replace(origin, golden=golden)
                self._by_key[older.key] = older
                return older
        raise CorruptSnapshot(
            f"The golden snapshot {golden_ref} of image {origin.image.digest[:12]}, which this snapshot lies on, is gone.",
            file=f"images/blobs/{origin.image.digest}/golden/{golden_ref.rpartition('.')[0]}/golden.json",
            hint="Restore the node's image directory; without it the snapshot cannot be used.",
        )

    def base(self, origin: Origin, manifest: Manifest | None) -> Base:
        """What a run of this origin lies on; its disk may lie on an older golden than its memory."""
        image = origin.image
        ref = BaseRef(image.digest, origin.golden.ref)
        disk_ref = ref if manifest is None else manifest.disk_base
        below = origin.golden if disk_ref.golden is None else self.at(origin, disk_ref.golden).golden
        return Base(ram=self._ram(origin.golden.ram), ram_ref=ref, disks=below.disk(image), disk_ref=disk_ref)

    def launch(self, origin: Origin, prefix: str, ram: Path | None = None) -> LaunchSpec:
        """``ram``: a base that is not the golden's."""
        name = f"{prefix}-{os.urandom(6).hex()}"
        memory_bytes = (origin.size.memory_mib << 20) + VMM_OVERHEAD_BYTES
        return LaunchSpec(
            name=name,
            run_dir=self._run_root / name,
            shape=origin.image.shape(origin.size),
            ram=Ram(ram or origin.golden.ram),
            accelerator=self.accelerator,
            limits=Limits(memory_bytes=memory_bytes, cpus=float(origin.size.vcpus) + 1.0),
            disk_below=origin.golden.disk(origin.image),
        )

    def forget(self, digest: str) -> list[tuple[str, str]]:
        """An image is gone or superseded: nothing of it is kept open here. Returns the keys its warm machines wait under."""
        self._origins = {key: origin for key, origin in self._origins.items() if key[0] != digest}
        self._rams = {path: ram for path, ram in self._rams.items() if digest not in path.parts}
        return [key for key in self._by_key if key[0] == digest]

    def ram_of(self, ref: BaseRef) -> BaseRam:
        """The RAM of a golden on this node, for who moves snapshots on it. Raises NotFound or CorruptSnapshot when it is gone."""
        assert ref.golden is not None, "memory without a golden has a base of its own"
        path = self.images.golden_path(ref.image, ref.golden)
        if not (path / "golden.json").is_file():
            raise CorruptSnapshot(
                f"The golden snapshot {ref.golden} of image {ref.image[:12]}, which this snapshot lies on, is gone.",
                file=f"images/blobs/{ref.image}/golden/{path.name}/golden.json",
            )
        return self._ram(load_golden(path).ram)

    def _ram(self, path: Path) -> BaseRam:
        """One mapping of each base in this process."""
        ram = self._rams.get(path)
        if ram is None:
            ram = self._rams[path] = BaseRam(path)
        return ram
