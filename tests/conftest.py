"""What every test may use: the order of the suites, a temporary home, the base image, the versions in the report's head.

Cheap suites run first, so that a broken style rule or unit is told before a VM has been booted.
"""

from __future__ import annotations

import gc
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.core.config import Settings

ROOT = Path(__file__).resolve().parent.parent
SUITES = ("style", "unit", "contract", "simulation", "torture", "integration", "e2e", "images")
#: The files of the last suite, but for the short ones, by how long they take. Files are dealt out whole, and one that is begun
#: last keeps a single process busy while the others have nothing left.
LONGEST = (
    "test_upgrade",
    "test_bad_input",
    "test_guides",
    "test_backup",
    "test_demo",
    "test_second_home",
    "test_guest_promises",
    "test_agent_programs",
    "test_waking",
    "test_sigkill",
    "test_sigkill_others",
    "test_egress",
    "test_branches",
    "test_shutdown",
    "test_idle",
    "test_ports",
    "test_sigkill_branches",
    "test_files",
    "test_execs",
    "test_integrity",
)


def _rank(item: pytest.Item) -> tuple[int, int, bool]:
    parts = item.path.relative_to(ROOT / "tests").parts
    suite = SUITES.index(parts[0]) if parts[0] in SUITES else len(SUITES)
    length = LONGEST.index(item.path.stem) if parts[0] == "e2e" and item.path.stem in LONGEST else len(LONGEST)
    return suite, length, item.get_closest_marker("qemu") is not None


def pytest_configure() -> None:
    """A shell that starts the tests in the background ignores these for them, and programs that they start would inherit that."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


def _is_second_line(item: pytest.Item) -> bool:
    """Whether a test is over a place where it belongs to the long form only: ``long_on("vm")``."""
    call = getattr(item, "callspec", None)
    places = {place for mark in item.iter_markers("long_on") for place in mark.args}
    return call is not None and not places.isdisjoint(map(str, call.params.values()))


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what ``-m`` leaves out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in filter(_is_second_line, items):
        item.add_marker("long")
    items.sort(key=_rank)  # stable: the order inside a file stays


def pytest_collection_finish() -> None:
    """Thousands of tests stay until the end: the garbage collector need not walk through them again and again."""
    gc.collect()
    gc.freeze()


def _base_digest(settings: Settings) -> str | None:
    name = settings.images / "names" / "base"
    return name.read_text().strip() if name.is_file() else None


def pytest_report_header() -> list[str]:
    settings = Settings()
    return [
        f"python: {platform.python_implementation()} {platform.python_version()} on {platform.platform()}",
        f"qemu: {shutil.which(settings.qemu) or 'not found'}",
        f"base image: {(_base_digest(settings) or 'not built')[:12]}",
    ]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of this checkout."""
    return ROOT


@pytest.fixture
def home() -> Iterator[Path]:
    """An empty data directory with a path short enough for Unix sockets (108 bytes), removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="perdure-", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def images_dir() -> Path:
    """The image cache of whoever runs the tests: built once by the setup, read only by tests."""
    return Settings().images


@pytest.fixture
def settings(home: Path, images_dir: Path) -> Settings:
    """Settings of a server of its own: temporary home, shared image cache, no TCP port that anybody else could hold."""
    return Settings(home=home, image_dir=images_dir, listen_port=0)


@pytest.fixture(scope="session")
def base_image(images_dir: Path) -> Path:
    """Directory of the built image ``base``. Its absence is a failure of the setup, not a reason to skip."""
    digest = _base_digest(Settings())
    if digest is None or not (images_dir / "blobs" / digest / "image.json").is_file():
        pytest.fail("The image 'base' is not built, so no test that boots a machine can run: run 'make setup'.", pytrace=False)
    return images_dir / "blobs" / digest


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This checkout built as a wheel."""
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(f"The wheel does not build:\n{done.stdout}{done.stderr}", pytrace=False)
    (built,) = target.glob("*.whl")
    return built
