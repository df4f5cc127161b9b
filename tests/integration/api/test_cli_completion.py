"""Completion in a real bash, with names from a server, and without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.cli.completion import SCRIPTS
from perdure.sdk import Client, Workspace
from tests.fakes.api_server import FakeServer
from tests.integration.api.test_cli import Run, perdure

__all__ = ["perdure"]  # the fixture

#: As bash fills them in: the words, and which of them the cursor is in.
ASK = """
perdure() {{ "{python}" -m perdure.cli.main "$@"; }}
{script}
COMP_WORDS=({words}) COMP_CWORD={index}
_perdure
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def in_bash(line: str, home: Path, **more: str) -> tuple[list[str], str]:
    """What TAB at the end of a line offers, and what it writes to the terminal."""
    words = line.split(" ")
    program = ASK.format(
        python=sys.executable, script=SCRIPTS["bash"], words=" ".join(f'"{word}"' for word in words), index=len(words) - 1
    )
    environment = {**os.environ, "PERDURE_HOME": str(home), **more}
    done = subprocess.run(["bash", "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.split("\n")[:-1] if done.stdout.strip() else [], done.stderr


@pytest.fixture
def named(client: Client) -> None:
    for name in ("alice", "albert", "bob"):
        Workspace.create(name, client=client)


@pytest.mark.usefixtures("named")
def test_names_come_from_the_server(server: FakeServer) -> None:
    home = server.settings.home
    assert in_bash("perdure exec al", home) == (["alice", "albert"], "")
    assert in_bash("perdure snapshot ver", home) == (["verify"], "")
    assert in_bash("perdure show x", home) == ([], "")


def test_without_a_server_nothing_is_said(home: Path) -> None:
    assert in_bash("perdure exec al", home) == ([], "")
    assert in_bash("perdure exec al", home, PERDURE_URL="nonsense") == ([], "")
    assert in_bash("perdure exec al", home, PERDURE_LISTEN_PORT="nonsense") == ([], "")
    assert in_bash("perdure ex", home) == (["exec", "execution"], ""), "commands are known without one"


@pytest.mark.usefixtures("named")
def test_a_server_that_does_not_answer_is_not_waited_for(
    server: FakeServer, perdure: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(server.workspaces, "find", never)
    monkeypatch.setattr("perdure.cli.completion.PATIENCE_S", 0.1)
    answer = perdure("__complete show al")
    assert (answer.code, answer.out, answer.err) == (0, "", "")


def test_names_and_what_is_said_of_them(perdure: Run) -> None:
    perdure("create demo")
    perdure("checkpoint demo --name before")
    assert perdure("__complete show d").out == "demo\trunning\n"
    assert perdure("__complete snapshot name demo b").out == "before\trequested\n"
    assert perdure("__complete image rm b").out == "base\t\n"
    assert perdure("__complete snapshot name nobody b").out == ""
    assert perdure("__complete").out.startswith("up\t")


def test_the_script_is_printed(perdure: Run) -> None:
    for shell, script in SCRIPTS.items():
        assert perdure(f"completion {shell}").out == script
        assert perdure(f"completion {shell} --json").json == {"shell": shell, "script": script}
    wrong = perdure("completion tcsh --json")
    assert (wrong.code, wrong.error["code"]) == (2, "usage")
