"""Real builds of tiny recipes with mmdebstrap: what is inside, what a failure says and leaves, and that equal input is equal."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.core.errors import BuildFailed
from perdure.images.build import BuildOptions, build_image
from perdure.images.model import Image
from perdure.images.progress import Progress, Step
from perdure.images.recipe import Recipe, RecipeFile
from perdure.images.registry import ImageStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TINY = Recipe(
    name="tiny",
    packages=("netbase",),
    files=(
        RecipeFile("/etc/greeting", b"hello\n", 0o640),
        RecipeFile("/usr/local/bin/greet", b"#!/bin/sh\ncat /etc/greeting\n", 0o755),
    ),
    commands=("greet > /root/greeted", "useradd -m agent && chown agent /home/agent"),
    disk_gib=2,
)


@pytest.fixture
def store(tmp_path: Path, base_image: Path) -> ImageStore:
    """An empty store that shares the agent disk of the base image, which takes long to fetch."""
    root = tmp_path / "images"
    for folder in ("agents", "cache"):
        shutil.copytree(base_image.parent.parent / folder, root / folder, copy_function=os.link)
    return ImageStore(root)


def debugfs(image: Image, request: str) -> str:
    """Look into the image's root disk without mounting it."""
    command = ["debugfs", "-R", request, str(image.directory / "root.raw")]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def read(image: Image, path: str) -> str:
    return debugfs(image, f"cat {path}")


def stat(image: Image, path: str) -> tuple[int, int, int]:
    """(mode, uid, gid) in the image's root disk."""
    text = debugfs(image, f"stat {path}")
    mode, uid, gid = (re.search(rf"{field}:\s+(\d+)", text) for field in ("Mode", "User", "Group"))
    assert mode
    assert uid
    assert gid
    return int(mode[1], 8) & 0o7777, int(uid[1]), int(gid[1])


def assert_clean(image: Image) -> None:
    """The file system has no fault that e2fsck can find."""
    command = ["e2fsck", "-fn", str(image.directory / "root.raw")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout


def rest_of(store: ImageStore) -> list[str]:
    """What is in the store besides images, the agent disk and the locks."""
    return [path.name for name in ("tmp", "blobs", "names") for path in sorted((store.root / name).glob("*"))]


async def test_a_tiny_image_holds_what_its_recipe_says(store: ImageStore) -> None:
    told: list[Progress] = []
    image = await build_image(TINY, store, BuildOptions(progress=told.append))
    assert read(image, "/root/greeted") == "hello\n"
    assert stat(image, "/etc/greeting") == (0o640, 0, 0)
    assert stat(image, "/home/agent")[1] >= 1000
    assert stat(image, "/usr/bin/su")[0] == 0o4755
    assert read(image, "/etc/machine-id") == ""
    assert read(image, "/etc/resolv.conf") == ""
    assert "netbase" in image.packages
    assert "apt" in image.packages
    assert (image.directory / "root.raw").stat().st_mode & 0o777 == 0o444
    assert (image.directory / "root.raw").stat().st_size == 2 << 30
    assert_clean(image)
    steps = [event.detail for event in told if event.step is Step.COMMAND and not event.log]
    assert steps == list(TINY.commands)
    assert rest_of(store) == [image.digest, "tiny"]
    async with store.only_one("build"):  # another build, which nobody has to wait for who has what he wants
        assert await asyncio.wait_for(build_image(TINY, store, BuildOptions(if_missing=True)), 60) == image


@pytest.mark.long
async def test_a_recipe_builds_equal_again(store: ImageStore, tmp_path: Path) -> None:
    image = await build_image(TINY, store)
    other = ImageStore(tmp_path / "other")
    for folder in ("agents", "cache"):
        shutil.copytree(store.root / folder, other.root / folder, copy_function=os.link)
    assert (await build_image(TINY, other)).digest == image.digest


async def test_a_failing_command_is_named_with_its_output_and_nothing_is_left(store: ImageStore) -> None:
    recipe = Recipe(name="broken", commands=("true", "echo some output; echo to stderr >&2; exit 3", "echo never"))
    with pytest.raises(BuildFailed) as caught:
        await build_image(recipe, store)
    message = caught.value.message
    assert message.startswith("The recipe's command 2 failed: echo some output")
    assert "some output\n" in message
    assert "to stderr" in message
    assert "never" not in message
    assert caught.value.hint
    assert rest_of(store) == []


@pytest.mark.long
async def test_a_package_that_does_not_exist_is_named(store: ImageStore) -> None:
    with pytest.raises(BuildFailed, match="no-such-package-here: there is no such package"):
        await build_image(Recipe(name="broken", packages=("no-such-package-here",)), store)
    assert rest_of(store) == []


@pytest.mark.long
async def test_cancelling_a_build_leaves_nothing(store: ImageStore) -> None:
    running = asyncio.Event()

    def on_progress(event: Progress) -> None:
        if event.step is Step.PACKAGES and event.log:
            running.set()

    task = asyncio.create_task(build_image(TINY, store, BuildOptions(progress=on_progress)))
    await asyncio.wait_for(running.wait(), 120)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rest_of(store) == []
    mounted = Path("/proc/self/mounts").read_text()
    assert str(store.root) not in mounted


BUILDER = """
import asyncio, sys
from pathlib import Path
from perdure.images.build import BuildOptions, build_image
from perdure.images.recipe import Recipe
from perdure.images.registry import ImageStore
tell = lambda event: print(event.detail, flush=True)
asyncio.run(build_image(Recipe(name="tiny"), ImageStore(Path(sys.argv[1])), BuildOptions(progress=tell)))
"""


@pytest.mark.long
async def test_a_killed_build_leaves_no_process_and_no_mount_and_is_swept(store: ImageStore) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", BUILDER, str(store.root), stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(240):
        while b"extracting archives" not in await process.stdout.readline():
            pass
    process.kill()
    async with asyncio.timeout(60):
        await process.wait()
        await process.stdout.read()  # its end: nobody below holds it any more
    assert str(store.root) not in Path("/proc/self/mounts").read_text()
    assert len(store.left_builds()) == 1
    assert len(store.sweep()) == 1
    assert rest_of(store) == []
