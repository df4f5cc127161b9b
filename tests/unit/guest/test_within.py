"""Paths that must stay below a directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure.guest import within
from perdure.guest.worker import Refusal
from perdure.wire.guest.ops import Code


@pytest.fixture(autouse=True)
def home() -> Iterator[None]:
    """Back to where the tests run: ``enter`` changes the working directory."""
    here = Path.cwd()
    yield
    os.chdir(here)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    (made / "a/b").mkdir(parents=True)
    (made / "a/b/file").write_text("inside")
    (tmp_path / "secret").write_text("outside")
    (made / "in").symlink_to("a/b")
    (made / "a/b/up").symlink_to("../../a")
    (made / "out").symlink_to("../secret")
    (made / "absolute").symlink_to(tmp_path / "secret")
    (made / "a/far").symlink_to("b/../../../secret")
    (made / "loop").symlink_to("loop")
    return made


@pytest.mark.parametrize(
    ("path", "follow", "directory", "name"),
    [
        ("a/b/file", True, "a/b", "file"),
        ("/a//./b/file", True, "a/b", "file"),
        ("in/file", True, "a/b", "file"),
        ("in", True, "a", "b"),
        ("in", False, "", "in"),
        ("out", False, "", "out"),
        ("in/up/b/file", True, "a/b", "file"),
        ("a/b/../b/file", True, "a/b", "file"),
        ("a/new", True, "a", "new"),
        ("", True, "", "."),
        ("a/..", True, "", "."),
    ],
)
def test_what_stays_inside_is_found(root: Path, path: str, follow: bool, directory: str, name: str) -> None:
    assert within.enter(str(root), path, follow=follow) == name
    assert Path.cwd() == root / directory


@pytest.mark.parametrize("path", ["..", "../secret", "a/../../secret", "out", "absolute", "a/far", "in/../../../secret", "out/x"])
def test_what_leads_out_is_refused(root: Path, path: str) -> None:
    with pytest.raises(Refusal, match="leads out") as refused:
        within.enter(str(root), path, follow=True)
    assert refused.value.code == Code.ESCAPE


def test_loops_and_what_is_missing_are_told(root: Path) -> None:
    with pytest.raises(OSError, match="symbolic link"):
        within.enter(str(root), "loop", follow=True)
    with pytest.raises(FileNotFoundError):
        within.enter(str(root), "none/file", follow=True)
    with pytest.raises(NotADirectoryError):
        within.enter(str(root), "a/b/file/x", follow=True)
    assert within.enter(str(root), "x/y/file", follow=True, make=True) == "file"
    assert (root / "x/y").is_dir()


_NAMES = st.sampled_from(["a", "b", "..", ".", "", "l", "m"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.lists(_NAMES, max_size=4), _NAMES), max_size=5), st.lists(_NAMES, max_size=6), st.booleans())
def test_no_links_and_no_path_lead_out(
    tmp_path_factory: pytest.TempPathFactory, links: list[tuple[list[str], str]], path: list[str], absolute: bool
) -> None:
    """Whatever links there are, where one ends up is below the root, or it is refused."""
    top = tmp_path_factory.mktemp("links")
    root = top / "root"
    (root / "a/b").mkdir(parents=True)
    for number, (target, name) in enumerate(links):
        place = root / ("a" if number % 2 else "") / (name if name not in {"", ".", ".."} else "l")
        if not place.exists() and not place.is_symlink():
            place.symlink_to(("/" if absolute and number == 0 else "") + ("/".join(target) or "."))
    try:
        name = within.enter(str(root), "/".join(path), follow=True)
    except (Refusal, OSError):
        return
    here = Path.cwd()
    assert here == root or root in here.parents
    assert not Path(name).is_symlink()
