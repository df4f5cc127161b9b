"""What the proofs of images share: marks, an image that is built when it is not there, a server in a home of its own.

Every test here is marked ``images`` and ``qemu``, so that ``make test`` leaves it out and ``make test-images`` runs it.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.live import COMMAND, Live, serving
from tests.images.shelf import Shelf, serving_shelf

HERE = Path(__file__).parent
BUILD_DEADLINE_S = 2400
#: Of one test with what its fixtures do: build an image, boot it twice.
TEST_DEADLINE_S = 3600


@pytest.hookimpl(tryfirst=True)  # before marks decide what is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.images)
            item.add_marker(pytest.mark.qemu)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TEST_DEADLINE_S))


@pytest.fixture(scope="session")
def built(pytestconfig: pytest.Config, images_dir: Path) -> Callable[[str], str]:
    """Builds the shipped image of a name, unless it is there, and returns the name. What it does is seen while it does it."""

    def build(name: str) -> str:
        with tempfile.TemporaryDirectory(prefix="perdure-", dir="/tmp") as home:
            names = {"PERDURE_HOME": home, "PERDURE_IMAGE_DIR": str(images_dir), "NO_COLOR": "1"}
            environment = {**{key: value for key, value in os.environ.items() if not key.startswith("PERDURE_")}, **names}
            command = [*COMMAND, "image", "build", name, "--if-missing"]
            with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
                subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, timeout=BUILD_DEADLINE_S, check=True)
        return name

    return build


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    """A host outside with repositories and packages; nothing is on it yet."""
    with serving_shelf(tmp_path_factory.mktemp("shelf")) as made:
        yield made


@pytest.fixture(scope="module")
def live(base_image: Path) -> Iterator[Live]:
    """A server that takes no checkpoint by itself: what a crash leaves is what the test asked for."""
    with serving(PERDURE_CHECKPOINT_INTERVAL_S="0") as running:
        yield running
