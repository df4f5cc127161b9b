"""Images and their builds."""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from perdure.wire.public.common import Answer, Base64, Body, ErrorInfo, Text


class ImageInfo(Answer):
    name: str
    digest: str
    created_at: datetime
    memory_mib: int
    min_memory_mib: int = Field(default=0, description="A workspace that asks for less is refused.")
    vcpus: int
    disk_gib: int
    kernel_version: str
    agent_protocol: int
    packages: int
    egress_allow: list[str] = Field(default_factory=list)
    stored_bytes: int | None = None
    ready: list[str] = Field(default_factory=list, description="Sizes that need no boot: 512x1 is 512 MiB and one CPU.")
    current: bool = Field(default=True, description="Whether a name points to it. Others are kept for workspaces made of them.")


class RecipeInfo(Answer):
    """A recipe that comes with the server. ``built``: there is an image of that name."""

    name: str
    memory_mib: int
    vcpus: int
    disk_gib: int
    built: bool


class ImageList(Answer):
    images: list[ImageInfo]
    recipes: list[RecipeInfo] = Field(default_factory=list, description="What can be built by its name alone.")


class PrunedImages(Answer):
    """``kept``: no name points to these either, but workspaces need them. ``freed_bytes`` are those of the disk."""

    removed: list[ImageInfo]
    kept: list[ImageInfo]
    freed_bytes: int


class BuildImage(Body):
    """``recipe`` is the TOML text, ``shipped`` the name of a recipe that comes with the server; without both: ``base``.
    ``sources``: the files a recipe names as ``source``, by that name. ``if_missing``: keep an image that is current already."""

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [{"properties": {"recipe": {"type": "null"}}}, {"properties": {"shipped": {"type": "null"}}}]}
    )

    recipe: Annotated[str, Field(max_length=1 << 20)] | None = None
    shipped: Text | None = None
    sources: dict[Text, Base64] = Field(default_factory=dict, max_length=1000)
    name: Text | None = None
    if_missing: bool = False

    @model_validator(mode="after")
    def _one_recipe(self) -> BuildImage:
        if self.recipe is not None and self.shipped is not None:
            raise ValueError("give one of 'recipe' and 'shipped'")
        return self

    @property
    def source_bytes(self) -> dict[str, bytes]:
        return {name: base64.b64decode(content) for name, content in self.sources.items()}


class BuildEvent(Answer):
    """One line of a build's stream. The last one is ``done`` with the image, or ``error``."""

    type: Literal["step", "log", "done", "error", "heartbeat"]
    step: str = ""
    detail: str = ""
    done: float | None = None
    total: float | None = None
    image: ImageInfo | None = None
    error: ErrorInfo | None = None
