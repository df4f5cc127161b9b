"""A real image directory with small images, a catalogue of it, and a fake node that starts nothing without its image."""

from __future__ import annotations

import hashlib
import os
from datetime import UTC, datetime
from pathlib import Path

from perdure.core.clock import Clock
from perdure.core.ids import NodeId
from perdure.images.model import Golden, Image
from perdure.images.registry import ImageStore, Withdrawn, golden_to_json, image_to_json, load_golden
from perdure.images.sparse import file_facts
from perdure.wire.node import MachineSize, StartReport, StartSpec
from tests.fakes.node import FakeNode

SIZE = MachineSize(512, 1)
WHEN = datetime(2026, 1, 1, tzinfo=UTC)


def digest_of(label: str) -> str:
    """That of an image which a test calls so."""
    return hashlib.sha256(label.encode()).hexdigest()


def put_image(store: ImageStore, digest: str, name: str = "base") -> Image:
    """An image of some bytes; it takes the name from the one that had it."""
    with store.scratch("build") as scratch:
        directory = scratch / "image"
        directory.mkdir()
        for file in ("kernel", "initrd", "root.raw", "agent.raw"):
            (directory / file).write_bytes(file.encode() * 10)
        (directory / "golden").mkdir()
        image = Image(
            digest=digest,
            name=name,
            created_at=WHEN,
            directory=directory,
            default_size=SIZE,
            disk_gib=8,
            kernel_version="6.12",
            agent_protocol=1,
            environment={},
            egress_allow=(),
            warm_up=("true",),
            packages={},
            kernel_digest="k",
            agent_release="a",
            recipe_digest="r",
            root_digest="o",
        )
        facts = {path.name: file_facts(path) for path in directory.iterdir() if path.is_file()}
        (directory / "image.json").write_bytes(image_to_json(image, facts))
        return store.publish(directory, digest)


def put_golden(store: ImageStore, image: Image, name: str = "512m1c-0") -> Golden:
    """A golden snapshot of it, as the node makes one for its VMM."""
    final = image.directory / "golden" / name
    if final.is_dir():
        return load_golden(final)
    with store.scratch("golden", final.parent) as scratch:
        output = scratch / "golden"
        output.mkdir()
        for file in ("ram.base", "devices.state", "disk.qcow2"):
            (output / file).write_bytes(name.encode())
        golden = Golden(image.digest, SIZE, output, "f", digest_of(name), 5.0, WHEN, 1, 1)
        facts = {path.name: file_facts(path) for path in output.iterdir()}
        (output / "golden.json").write_bytes(golden_to_json(golden, facts))
        output.rename(final)
    return load_golden(final)


class Images(ImageStore):
    """The catalogue of workspaces over a directory. ``die`` gives back what a killed process would have held."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._withdrawn: set[int] = set()

    async def find(self, ref: str) -> Image:
        return self.resolve(ref)

    def withdraw(self, image: Image) -> Withdrawn:
        withdrawn = super().withdraw(image)
        self._withdrawn.add(withdrawn.lock)
        return withdrawn

    def put_back(self, withdrawn: Withdrawn) -> None:
        self._withdrawn.discard(withdrawn.lock)
        super().put_back(withdrawn)

    def discard(self, withdrawn: Withdrawn) -> int:
        self._withdrawn.discard(withdrawn.lock)
        return super().discard(withdrawn)

    def die(self) -> None:
        while self._withdrawn:
            os.close(self._withdrawn.pop())


class NodeWithImages(FakeNode):
    """Starts, and goes on, only with the image and its golden snapshot at hand."""

    def __init__(self, images: ImageStore, node_id: NodeId, clock: Clock) -> None:
        super().__init__(node_id, clock=clock)
        self.images = images

    async def start(self, spec: StartSpec) -> StartReport:
        report = await super().start(spec)
        try:
            self.images.golden(self.images.load(spec.image), "512m1c-0")
        except BaseException:
            self.machines.pop(spec.identity.workspace_id).end()
            raise
        return report
