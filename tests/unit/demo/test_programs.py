"""The programs that run inside the workspace, on the host's own Python: standard library only, and they do what the demo asks."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import perdure.demo
from perdure.demo.steps import DemoFailed
from perdure.demo.web import ask

PROGRAMS = Path(perdure.demo.__file__).parent / "programs"


@contextmanager
def running(program: str, *arguments: str) -> Iterator[int]:
    """The program on a free port, without site-packages, as in the workspace."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-I", "-S", str(PROGRAMS / program), *arguments, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield port
        finally:
            process.kill()


async def test_the_indexer_holds_a_tree_in_memory_and_answers(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "a.py").write_text("import alpha\n")
    (tmp_path / "b.py").write_text("import beta\n")
    with running("indexer.py", str(tmp_path)) as port:
        about = (await ask(port, "GET", "/")).json()
        assert (about["files"], about["bytes"], about["notes"]) == (2, 25, [])
        assert (await ask(port, "GET", "/search", word="import")).json() == {
            "word": "import",
            "files": 2,
            "first": ["a.py", "b.py"],
        }
        (tmp_path / "a.py").write_text("gamma\n")
        assert (await ask(port, "GET", "/file", path="a.py")).body == b"import alpha\n"
        await ask(port, "POST", "/refresh", path="a.py")
        assert (await ask(port, "GET", "/search", word="alpha")).json()["files"] == 0
        assert (await ask(port, "GET", "/search", word="gamma")).json()["files"] == 1
        await ask(port, "POST", "/note", text="two words & more")
        again = (await ask(port, "GET", "/")).json()
        assert again["notes"] == ["two words & more"]
        assert (again["pid"], again["drawn"]) == (about["pid"], about["drawn"])
        assert again["digest"] != about["digest"]
        with pytest.raises(DemoFailed, match="404"):
            await ask(port, "GET", "/file", path="../secret")


async def test_the_holder_grows_changes_and_drops_what_it_holds() -> None:
    with running("holder.py") as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for command, held in ((b"grow 3\n", 3), (b"change 5\n", 3), (b"grow 1\n", 4), (b"drop 2\n", 2), (b"change 3\n", 2)):
            writer.write(command)
            assert await reader.readline() == b"ok %d\n" % held
        writer.close()


def test_nothing_is_left_of_the_programs() -> None:
    listing = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in listing.splitlines() if str(PROGRAMS) in line and line.split()[0] == str(os.getpid())]
