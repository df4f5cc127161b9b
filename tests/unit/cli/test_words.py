"""The command line before anything is done: splitting, naming places, escaping."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.cli.arguments import asks_json, prepare
from perdure.cli.copy import Place, parse_place
from perdure.cli.forward import parse_ports
from perdure.cli.output import duration, markup, safe, size
from perdure.core.errors import InvalidRequest


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("exec demo ls -la --json", "exec demo -- ls -la --json"),
        ("exec demo -- ls -- x", "exec demo -- ls -- x"),
        ("exec --json demo ls", "exec --json demo -- ls"),
        ("exec demo --json ls", "exec demo --json -- ls"),
        ("exec demo --cwd /tmp -e A=1 ls -e x", "exec demo --cwd /tmp -e A=1 -- ls -e x"),
        ("exec -u root demo", "exec -u root demo"),
        ("--json exec demo ls", "--json exec demo -- ls"),
        ("exec demo", "exec demo"),
        ("snapshots ls demo", "snapshot ls demo"),
        ("images ls", "image ls"),
        ("ls exec a b", "ls exec a b"),
        ("", ""),
    ],
)
def test_prepare(line: str, becomes: str) -> None:
    assert " ".join(prepare(line.split())) == becomes


def test_json_of_the_command_itself_is_not_ours() -> None:
    assert not asks_json(prepare(["exec", "demo", "tool", "--json"]))
    assert asks_json(prepare(["exec", "--json", "demo", "tool"]))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("demo:/etc/hosts", Place("/etc/hosts", "demo")),
        ("demo:notes", Place("/root/notes", "demo")),
        ("demo:", Place("/root", "demo")),
        ("demo@lost-1:/x:y", Place("/x:y", "demo@lost-1")),
        ("./a:b", Place("./a:b")),
        ("/tmp/a:b", Place("/tmp/a:b")),
        ("file", Place("file")),
        ("-", Place("-")),
    ],
)
def test_places(text: str, place: Place) -> None:
    assert parse_place(text) == place


@pytest.mark.parametrize(("text", "ports"), [("8080:80", (8080, 80)), ("80", (80, 80)), ("0:80", (0, 80)), (":80", (0, 80))])
def test_ports(text: str, ports: tuple[int, int]) -> None:
    assert parse_ports(text) == ports


@pytest.mark.parametrize("text", ["", "a:b", "80:", "1:2:3", "70000:1", "1:0", "-1:5"])
def test_bad_ports(text: str) -> None:
    if text == "80:":
        assert parse_ports(text) == (80, 80)
        return
    with pytest.raises(InvalidRequest, match="is not a pair of ports"):
        parse_ports(text)


@given(st.text(st.characters(codec=None)))
def test_nothing_from_a_workspace_can_move_the_cursor(text: str) -> None:
    shown = safe(text)
    assert shown.isprintable()
    shown.encode()


def test_escapes_stay_readable() -> None:
    assert safe("a\x1b[31m\r\n\x9b\u202eb\udcff é") == "a\\x1b[31m\\x0d\\x0a\\x9b\\u202eb\\xff é"
    assert markup("[red]x[/]") == "\\[red]x\\[/]"


def test_sizes_and_times() -> None:
    assert [size(n) for n in (0, 999, 1500, 12_000_000, 123_456_789, 5e12)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "12.0 MB",
        "123 MB",
        "5.0 TB",
    ]
    assert [duration(s) for s in (0.015, 5, 119, 120, 7200, 1e6)] == ["15 ms", "5 s", "119 s", "2 min", "2 h", "12 d"]
