"""What the control plane needs to know of images. ``perdure.images`` has it; ``wiring`` brings the two together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from perdure.wire.node import MachineSize


class ImageFacts(Protocol):
    """The part of ``images.model.Image`` that a workspace is made from."""

    @property
    def digest(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def default_size(self) -> MachineSize: ...
    @property
    def disk_gib(self) -> int: ...
    @property
    def min_memory_mib(self) -> int: ...
    @property
    def environment(self) -> Mapping[str, str]: ...
    @property
    def egress_allow(self) -> tuple[str, ...]: ...


class ImageCatalog(Protocol):
    async def find(self, ref: str) -> ImageFacts:
        """An image by name or digest. Raises NotFound with the names there are."""
        ...
