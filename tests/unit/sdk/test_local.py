"""Downloads from a workspace that lies: nothing is ever written outside the destination."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure.core.errors import InvalidRequest, NoSpace, NotFound
from perdure.sdk import _local
from perdure.sdk._local import LocalTree, Transfer, walk_local
from perdure.wire.node import FileKind
from perdure.wire.public import FileInfo
from tests.fakes.memory_guest import MOMENT


def info(name: str, kind: FileKind = FileKind.FILE, **fields: object) -> FileInfo:
    values = {"size": 0, "mode": 0o644, "uid": 0, "gid": 0, "modified_at": MOMENT, **fields}
    return FileInfo(path="/x/" + name, name=name, kind=kind, **values)  # type: ignore[arg-type]


ROOT = info("root", FileKind.DIRECTORY, mode=0o755)


@pytest.fixture
def cage(tmp_path: Path) -> Iterator[Path]:
    """A directory beside which nothing may appear or change."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("untouched")
    yield tmp_path / "destination"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "destination") == ["outside"]
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_text() == "untouched"


def put(tree: LocalTree, relative: tuple[str, ...], data: bytes, **fields: object) -> None:
    with tree.create(relative, info(relative[-1], size=len(data), **fields)) as file:
        file.write(data)


@pytest.mark.parametrize("name", ["", ".", "..", "../outside/secret", "/etc/passwd", "a/b", "x" * 256])
def test_impossible_names_are_skipped(cage: Path, name: str) -> None:
    with LocalTree(cage, ROOT) as tree:
        assert tree.enter((), ROOT)
        assert tree.admit((), info(name)) is None
    assert len(tree.transfer.skipped) == 1


@pytest.mark.parametrize(
    ("target", "depth", "made"),
    [
        ("file", 0, True),
        ("sub/file", 0, True),
        ("./sub/./file", 0, True),
        ("../file", 1, True),
        ("../../a/b", 2, True),
        ("../outside", 0, False),
        ("../../outside", 1, False),
        ("/etc/passwd", 3, False),
        ("sub/../..", 1, False),
        ("a/a/../../x", 1, False),
        ("..", 0, False),
        ("", 0, False),
        ("x\ufffd", 0, False),
    ],
)
def test_links_are_made_only_when_they_stay_inside(cage: Path, target: str, depth: int, made: bool) -> None:
    relative = tuple(f"d{level}" for level in range(depth))
    with LocalTree(cage, ROOT) as tree:
        for level in range(depth + 1):
            assert tree.enter(relative[:level], ROOT)
        tree.link((*relative, "link"), info("link", FileKind.SYMLINK, target=target))
    assert cage.joinpath(*relative, "link").is_symlink() is made
    assert (len(tree.transfer.skipped), tree.transfer.links) == ((0, 1) if made else (1, 0))


_PARTS = st.sampled_from(["a", "b", "..", ".", "", "link"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(st.lists(st.sampled_from("ab"), max_size=2), st.lists(_PARTS, max_size=5)), max_size=6))
def test_no_set_of_links_leads_out(tmp_path_factory: pytest.TempPathFactory, links: list[tuple[list[str], list[str]]]) -> None:
    """Whatever links a workspace lists, every one that is made resolves inside the destination."""
    top = tmp_path_factory.mktemp("links")
    root = top / "destination"
    with LocalTree(root, ROOT) as tree:
        for number, (where, parts) in enumerate(links):
            relative = tuple(where)
            if all(tree.enter(relative[:level], ROOT) for level in range(len(relative) + 1)):
                name = "link" if number == 0 else f"link{number}"
                tree.link((*relative, name), info(name, FileKind.SYMLINK, target="/".join(parts)))
            while tree._open:
                os.close(tree._open.pop())
                tree._names.pop()
    for path in root.rglob("*"):
        if path.is_symlink() and not is_loop(path):
            resolved = Path(os.path.realpath(path))
            assert resolved == root.resolve() or root.resolve() in resolved.parents, (path, path.readlink())


def is_loop(link: Path) -> bool:
    """Nobody can follow a loop, and ``realpath`` makes up a path for one."""
    try:
        os.path.realpath(link, strict=True)
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def test_planted_link_is_not_written_through(cage: Path) -> None:
    """A link that lies where a directory or file shall go (an earlier copy, or the user) is never followed."""
    cage.mkdir()
    (cage / "dir").symlink_to("../outside")
    (cage / "file").symlink_to("../outside/secret")
    with LocalTree(cage, ROOT) as tree:
        assert tree.enter((), ROOT)
        assert not tree.enter(("dir",), info("dir", FileKind.DIRECTORY))
        put(tree, ("file",), b"replaced")
    assert [one.path for one in tree.transfer.skipped] == ["dir"]
    assert not (cage / "file").is_symlink()
    assert (cage / "file").read_bytes() == b"replaced"


def test_name_that_is_listed_twice_is_taken_once(cage: Path) -> None:
    """A link and then a directory of the same name: the classic way out."""
    with LocalTree(cage, ROOT) as tree:
        assert tree.enter((), ROOT)
        assert tree.admit((), info("x", FileKind.SYMLINK)) == "x"
        assert tree.admit((), info("x", FileKind.DIRECTORY)) is None


def test_modes_are_plain(cage: Path) -> None:
    with LocalTree(cage, ROOT) as tree:
        assert tree.enter((), ROOT)
        put(tree, ("suid",), b"x", mode=0o6755)
    assert stat.S_IMODE((cage / "suid").stat().st_mode) == 0o755


def test_failed_file_leaves_nothing_and_keeps_the_old(cage: Path) -> None:
    cage.mkdir()
    (cage / "file").write_text("old")
    with LocalTree(cage, ROOT) as tree:
        assert tree.enter((), ROOT)
        with pytest.raises(RuntimeError), tree.create(("file",), info("file")) as file:
            file.write(b"half")
            raise RuntimeError
    assert [path.name for path in cage.iterdir()] == ["file"]
    assert (cage / "file").read_text() == "old"


def test_sizes_are_not_believed(cage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_local, "GROWTH_BYTES_MAX", 10)
    with LocalTree(cage, ROOT) as tree:
        assert tree.enter((), ROOT)
        with (
            pytest.raises(InvalidRequest, match="much larger than the workspace said"),
            tree.create(("f",), info("f", size=5)) as file,
        ):
            file.write(b"x" * 16)
        with (
            pytest.raises(NoSpace, match="needs 1152921504606846976 bytes"),
            tree.create(("f",), info("f", size=1 << 60)) as file,
        ):
            pass
        monkeypatch.setattr(_local, "ENTRIES_MAX", 1)
        assert tree.admit((), info("a")) == "a"
        with pytest.raises(InvalidRequest, match="more than 1 files"):
            tree.admit((), info("b"))
        monkeypatch.setattr(_local, "DEPTH_MAX", 1)
        assert not tree.enter(("a", "b"), info("b", FileKind.DIRECTORY))
    assert list(cage.iterdir()) == []


def test_local_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no local file"):
        list(walk_local(tmp_path / "none", Transfer()))
    with pytest.raises(NotFound, match="no local file"), LocalTree(tmp_path / "no" / "file", info("f")):
        pass
    (tmp_path / "file").write_text("x")
    with LocalTree(tmp_path / "file", ROOT) as tree, pytest.raises(InvalidRequest, match="cannot be used"):
        tree.enter((), ROOT)
    os.mkfifo(tmp_path / "pipe")
    transfer = Transfer()
    assert [entry.relative for entry in walk_local(tmp_path, transfer)] == ["", "file"]
    assert [one.reason for one in transfer.skipped] == ["it is a device, socket or pipe"]
