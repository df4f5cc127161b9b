"""A command line that asks for little loads little: what would be imported for nothing is named here, so that it stays out."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.cli import commands
from perdure.cli.commands import Entry, Later

#: Only the server needs these; the command line has them for ``up``, ``doctor`` and what else works without a server.
SERVER = {
    "perdure.wiring",
    "perdure.api",
    "perdure.node",
    "perdure.workspaces",
    "fastapi",
    "uvicorn",
    "psycopg",
    "numpy",
    "obstore",
}
CLIENT = {"perdure.sdk", "perdure.wire", "perdure.core.config", "httpx2", "asyncio"}
WEBSOCKETS = {"websockets"}
DRAWING = {"rich"}

PROGRAM = """
import sys
from perdure.cli.main import main
main(sys.argv[1:])
sys.stderr.write("\\n" + " ".join(sys.modules))
"""


def loaded(home: Path, *words: str) -> set[str]:
    """Names of the modules that a command line has loaded when it ends."""
    environment = {"PATH": "/usr/bin:/bin", "PERDURE_HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], env=environment, capture_output=True, text=True, check=True)
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("words", "unneeded"),
    [
        (["--version"], SERVER | CLIENT | WEBSOCKETS | DRAWING),
        (["--help"], SERVER | CLIENT | WEBSOCKETS | {"pydantic"}),
        (["__complete", "snap"], SERVER | CLIENT | WEBSOCKETS | DRAWING | {"pydantic"}),
        (["snapshot", "--help"], SERVER | CLIENT | WEBSOCKETS),
        (["ls", "--json"], SERVER | WEBSOCKETS | DRAWING),
        (["exec", "demo", "--json", "--", "true"], SERVER | WEBSOCKETS | DRAWING),
        (["ls"], SERVER | WEBSOCKETS),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",  # a set has no order that two processes share
)
def test_what_a_command_does_not_need_is_not_loaded(words: list[str], unneeded: set[str], home: Path) -> None:
    found = loaded(home, *words)
    assert "perdure.cli.main" in found
    assert unneeded & found == set()


ENTRIES = [*commands.COMMANDS, *(entry for _, _, entries in commands.GROUPS for entry in entries)]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.place)
def test_a_summary_is_what_the_command_says_of_itself(entry: Entry) -> None:
    command = Later(entry).load()
    assert command.name == entry.name
    paragraph, *_ = inspect.cleandoc(command.help or "").split("\n\n")
    assert " ".join(paragraph.split()) == entry.summary
