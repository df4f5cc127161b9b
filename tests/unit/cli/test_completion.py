"""What a word may become, before any server is asked; and that the scripts are what shells can read."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.cli import commands
from perdure.cli.completion import SCRIPTS, Candidate, complete

ASKED: list[tuple[str, list[str], str]] = []


def ask(kind: str, arguments: Sequence[str], begin: str) -> list[Candidate]:
    ASKED.append((kind, [*arguments], begin))
    return [Candidate(f"{kind}-1"), Candidate(f"{kind}-2")]


def values(line: str) -> list[str]:
    ASKED.clear()
    return [one.value for one in complete(line.split(" "), ask)]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("sna", ["snapshot"]),
        ("keep", ["keep-awake"]),
        ("snapshot n", ["name"]),
        ("snapshots n", ["name"]),
        ("snapshot --json n", ["name"]),
        ("--json sna", ["snapshot"]),
        ("--ver", ["--version"]),
        ("ls --sta", ["--state"]),
        ("ls --state hib", ["hibernating", "hibernated"]),
        ("list --state hib", ["hibernating", "hibernated"]),
        ("recover demo --how re", ["retry", "rewind"]),
        ("recover workspaces-1 --h", ["--how", "--help"]),
        ("usage --by t", ["tenant"]),
        ("completion ", ["bash", "zsh", "fish"]),
        ("completion bash ", []),
        ("tree", []),
        ("nonsense x", []),
        ("snapshot nonsense x", []),
        ("exec --cwd /tmp --", ["--shell", "--cwd", "--user"]),
    ],
)
def test_words(line: str, found: list[str]) -> None:
    assert values(line)[: len(found) or None] == found


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("show ", ("workspaces", [], "")),
        ("show wo", ("workspaces", [], "wo")),
        ("rm a b wo", ("workspaces", ["a", "b"], "wo")),
        ("usage ", ("workspaces", [], "")),
        ("exec --cwd /tmp -e A=1 ", ("workspaces", [], "")),
        ("sleep --durable store ", ("workspaces", [], "")),
        ("snapshot name demo ", ("snapshots", ["demo"], "")),
        ("snapshot rm demo one ", ("snapshots", ["demo", "one"], "")),
        ("image rm ", ("images", [], "")),
        ("ls --image ", ("images", [], "")),
        ("key revoke ", ("keys", [], "")),
        ("key ls --tenant ", ("tenants", [], "")),
        ("tenant shred ", ("tenants", [], "")),
    ],
)
def test_what_only_the_server_knows_is_asked_of_it(line: str, asked: tuple[str, list[str], str]) -> None:
    found = values(line)
    assert [asked] == ASKED
    begin = asked[2]
    assert found == [f"{asked[0]}-{number}" for number in (1, 2) if asked[0].startswith(begin) or not begin]


@pytest.mark.parametrize(
    "line",
    [
        "create ",
        "key create ",
        "tenant create ",
        "exec demo ",
        "exec demo -- ",
        "exec demo ls ",
        "cp ",
        "show a ",
        "ls --prefix ",
    ],
)
def test_where_nothing_is_known_the_shell_offers_its_files(line: str) -> None:
    assert values(line) == []
    assert ASKED == []


WORDS = st.sampled_from(
    ["", "-", "--", "--json", "--state", "-e", "ls", "rm", "snapshot", "key", "exec", "demo", "=", "a b", "\0", "é", "--nonsense"]
)


@given(st.lists(WORDS | st.text(max_size=8), min_size=1, max_size=6))
def test_no_line_makes_it_fail(words: list[str]) -> None:
    for one in complete(words, ask):
        assert one.value.startswith(words[-1])


def test_every_command_can_be_reached() -> None:
    entries = [("", commands.COMMANDS), *((f"{name} ", entries) for name, _, entries in commands.GROUPS)]
    for group, found in entries:
        offered = values(group)
        assert {entry.name for entry in found if not entry.hidden} <= set(offered)
        assert not {entry.name for entry in found if entry.hidden} & set(offered)


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_shell_can_read_its_script(shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([program, "-n", "/dev/stdin"], input=SCRIPTS[shell], text=True, check=True, capture_output=True)
