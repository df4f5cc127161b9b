"""What an image and its golden snapshots are on disk. Read by the node; written by ``build`` and ``golden``.

IMAGES/
  blobs/<digest>/           one complete image; made under a temporary name, fsynced, renamed
    image.json              an Image, with sizes and checksums of the files beside it
    kernel initrd           what QEMU boots
    root.raw                ext4, sparse, 0444
    agent.raw               read-only agent disk: kernel modules, init, agent, its own Python
    golden/<size>-<fp>/     a Golden: ram.base (0444), devices.state, disk.qcow2 (0444), golden.json
    golden/<size>-<fp>+<base>/   one that was made elsewhere, beside one of that name made here
  names/<name>              text file holding a digest, replaced by rename
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from perdure.machines.driver import DiskChain, DiskLayer, Shape
from perdure.wire.node import MachineSize

#: Between a golden's name and its base in the name of a directory.
BESIDE = "+"


@dataclass(frozen=True, slots=True)
class Image:
    """A built image. ``digest`` covers recipe, resolved packages with hashes, agent disk and kernel."""

    digest: str  # 64 hex digits
    name: str
    created_at: datetime
    directory: Path
    default_size: MachineSize
    disk_gib: int
    kernel_version: str
    agent_protocol: int
    environment: Mapping[str, str]
    egress_allow: tuple[str, ...]
    warm_up: tuple[str, ...]  # shell commands run in the golden VM before its capture, so that their pages are in the base
    packages: Mapping[str, str]  # name -> version
    kernel_digest: str  # sha256 of the kernel file
    agent_release: str  # digest of agent disk, kernel and initrd together
    recipe_digest: str
    root_digest: str  # the recipe's part in the root disk, and every package with its hash
    min_memory_mib: int = 0  # what its recipe says that a workspace needs
    boot_directory: Path | None = None  # where kernel, initrd and agent disk are, when they are not its own (see ``modern``)

    @property
    def root(self) -> DiskLayer:
        return DiskLayer(self.directory / "root.raw", "raw")

    def shape(self, size: MachineSize) -> Shape:
        boot = self.boot_directory or self.directory
        return Shape(
            kernel=boot / "kernel",
            initrd=boot / "initrd",
            agent_disk=boot / "agent.raw",
            memory_mib=size.memory_mib,
            vcpus=size.vcpus,
            disk_bytes=self.disk_gib << 30,
        )


@dataclass(frozen=True, slots=True)
class Golden:
    """The snapshot that every new workspace of (image, size) starts from; its RAM is the base that all of them map."""

    image: str
    size: MachineSize
    directory: Path
    fingerprint: str
    base_id: str  # sha256 of the RAM's non-zero pages: a delta fits this base and no other, even one of equal fingerprint
    boot_s: float  # from the VMM's start to the agent's hello
    created_at: datetime
    ram_bytes: int  # apparent size
    ram_stored_bytes: int  # after holes

    @property
    def name(self) -> str:
        """Of its directory, by which a VMM of this fingerprint finds it."""
        return self.directory.name.partition(BESIDE)[0]

    @property
    def ref(self) -> str:
        """What snapshots record: the name, and which RAM it was. One made again under the same name is another base."""
        return f"{self.name}.{self.base_id[:16]}"

    @property
    def ram(self) -> Path:
        return self.directory / "ram.base"

    @property
    def devices(self) -> Path:
        return self.directory / "devices.state"

    def disk(self, image: Image) -> DiskChain:
        """The frozen layers below a workspace's own."""
        return DiskChain((image.root, DiskLayer(self.directory / "disk.qcow2", "qcow2")))
