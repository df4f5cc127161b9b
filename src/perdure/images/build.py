"""Building an image: agent release, root disk, image.json, then the golden snapshot of the default size.

A build works in a temporary directory and takes its place by one rename; whatever ends it before leaves nothing. Equal inputs
(recipe, packages, agent disk, kernel) give an equal digest, and an image of that digest is never replaced.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from perdure.core import files
from perdure.core.errors import NoSpace, NotFound
from perdure.images import agentdisk
from perdure.images.agentdisk import AgentRelease
from perdure.images.bootstrap import choose_mode, remove_all
from perdure.images.model import Image
from perdure.images.modern import chosen
from perdure.images.progress import Progress, ProgressSink, Step, silent
from perdure.images.recipe import Recipe
from perdure.images.registry import ImageStore, image_to_json
from perdure.images.rootdisk import RootDisk, build_root
from perdure.images.sparse import file_facts

#: Free bytes below which a build is not begun: the unpacked system, its tar and its disk exist at the same time.
ROOM_BYTES = 3 << 30


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """``if_missing``: keep an image of this name that has the same recipe and the current agent. ``progress`` is called in the
    event loop's thread."""

    if_missing: bool = False
    name: str | None = None  # instead of the recipe's
    progress: ProgressSink = silent


async def build_image(recipe: Recipe, store: ImageStore, options: BuildOptions | None = None) -> Image:
    """Build an image without its golden snapshot and give it its name.

    Raises BuildFailed with the failing command and its output, HostUnfit for a missing tool or right, NoSpace. Nothing is left
    behind by a build that fails or is cancelled.
    """
    options = options or BuildOptions()
    name = options.name or recipe.name
    if options.if_missing and (present := current(recipe, store, name)) and is_current_agent(present, store):
        return present  # nor does it wait for somebody else's build
    async with store.only_one("build", lambda: options.progress(Progress(Step.WAITING, "Another build is under way"))):
        present = current(recipe, store, name)
        if present is not None and options.if_missing and is_current_agent(present, store):
            return present  # whom we waited for has built it
        _check_room(store.root)
        mode = await choose_mode()
        await remove_all(store.left_builds(), mode)
        await asyncio.to_thread(store.sweep)
        with store.scratch("build") as scratch:
            release = await agentdisk.ensure_release(store.root, scratch, mode, options.progress)
            root = _reuse(present) if present is not None and options.if_missing else None
            if root is None:
                root = await build_root(recipe, scratch, mode, options.progress)
            options.progress(Progress(Step.STORE, "Checksums"))
            image = await asyncio.to_thread(_assemble, _Parts(recipe, name, release, root), store, scratch)
        await asyncio.to_thread(_drop_old_releases, store)
        return image


def current(recipe: Recipe, store: ImageStore, name: str) -> Image | None:
    """The image of that name when it was built from the same recipe."""
    try:
        image = store.resolve(name)
    except NotFound:
        return None
    return image if image.recipe_digest == recipe.digest else None


def is_current_agent(image: Image, store: ImageStore) -> bool:
    """Whether the image's agent disk is the one this version of Perdure makes."""
    wanted = agentdisk.sources_digest()
    return any(r.digest == image.agent_release and r.sources_digest == wanted for r in agentdisk.releases(store.root))


def _drop_old_releases(store: ImageStore) -> None:
    """Agent releases that neither an image nor the next build uses. Their files live on in the images that were built with them,
    by hard links; an image that only boots with one has nothing but the release itself."""
    images = store.all()
    used = {image.agent_release for image in images} | {chosen(image) for image in images}
    wanted = agentdisk.sources_digest()
    for release in agentdisk.releases(store.root):
        if release.digest not in used and release.sources_digest != wanted:
            files.remove_tree(release.directory)


def _reuse(image: Image) -> RootDisk:
    """A new agent boots an old root: only the agent disk is made again."""
    return RootDisk(image.directory / "root.raw", image.root_digest, image.packages)


def _check_room(root: Path) -> None:
    files.make_dir(root)
    free = files.free_bytes(root)
    if free < ROOM_BYTES:
        raise NoSpace(f"Building an image needs {ROOM_BYTES >> 20} MiB of disk space, but {root} has {free >> 20} MiB left.")


@dataclass(frozen=True, slots=True)
class _Parts:
    recipe: Recipe
    name: str
    release: AgentRelease
    root: RootDisk

    @property
    def digest(self) -> str:
        recipe, release = self.recipe.digest, self.release
        return hashlib.sha256(f"{recipe}{self.root.digest}{release.digest}{release.kernel_digest}".encode()).hexdigest()


def _assemble(parts: _Parts, store: ImageStore, scratch: Path) -> Image:
    directory = scratch / "image"
    directory.mkdir()
    for path in parts.release.files:
        (directory / path.name).hardlink_to(path)
    (directory / "root.raw").hardlink_to(parts.root.path)
    (directory / "golden").mkdir()
    recipe, release = parts.recipe, parts.release
    image = Image(
        digest=parts.digest,
        name=parts.name,
        created_at=datetime.now(UTC),
        directory=directory,
        default_size=recipe.size,
        disk_gib=recipe.disk_gib,
        kernel_version=release.kernel_version,
        kernel_digest=release.kernel_digest,
        agent_protocol=release.agent_protocol,
        agent_release=release.digest,
        recipe_digest=recipe.digest,
        root_digest=parts.root.digest,
        min_memory_mib=recipe.min_memory_mib,
        environment=recipe.environment,
        egress_allow=recipe.egress_allow,
        warm_up=recipe.warm_up,
        packages=parts.root.packages,
    )
    facts = {path.name: file_facts(path) for path in sorted(directory.iterdir()) if path.is_file()}
    files.create_file(directory / "image.json", image_to_json(image, facts), mode=0o444)
    return store.publish(directory, image.digest)
