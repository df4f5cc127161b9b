"""``perdure worker``: what its words mean, and what it prints."""

from __future__ import annotations

import json
from typing import Any

import pytest

from perdure.cli.worker import Asked, Teller, _asked, line
from perdure.core.errors import InvalidRequest
from perdure.worker.runtime import BOOTSTRAP


@pytest.mark.parametrize(
    ("handlers", "command", "function", "asked"),
    [
        (["app:main"], None, None, (("main=app:main",), None)),
        (["order=shop.app:Orders.run", "app:main"], None, None, (("order=shop.app:Orders.run", "main=app:main"), None)),
        (["lib/app.mjs:main"], None, None, ((), ("main", ["node", str(BOOTSTRAP), "lib/app.mjs:main"]))),
        (["order=app.js:main"], None, None, ((), ("order", ["node", str(BOOTSTRAP), "app.js:main"]))),
        ([], "java -jar 'my app.jar'", "order", ((), ("order", ["java", "-jar", "my app.jar"]))),
    ],
)
def test_what_is_served(handlers: list[str], command: str | None, function: str | None, asked: Asked) -> None:
    assert _asked(handlers, command, function) == asked


@pytest.mark.parametrize(
    ("handlers", "command", "function"),
    [
        ([], None, None),
        (["app"], None, None),
        (["app:"], None, None),
        ([":main"], None, None),
        (["a b=app:main"], None, None),
        (["app:main", "other:main"], None, None),
        (["app.mjs:main", "app:main"], None, None),
        (["app:main"], "node app.mjs", "main"),
        (["app:main"], None, "main"),
        ([], "node app.mjs", None),
        ([], " ", "main"),
        ([], "node app.mjs", "no/name"),
        (["x" * 65 + "=app:main"], None, None),
    ],
)
def test_what_is_not(handlers: list[str], command: str | None, function: str | None) -> None:
    with pytest.raises(InvalidRequest):
        _asked(handlers, command, function)


FLIGHT = {"execution_id": "exn_1", "invocation": 2, "function": "main"}


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("invoked", FLIGHT, "main exn_1 #2 begins"),
        ("ended", {**FLIGHT, "result": "waits", "seconds": 0.25}, "main exn_1 #2 [green]waits[/] after 250 ms"),
        ("ended", {**FLIGHT, "result": "raised", "seconds": 3.0, "message": "bad \x1b[2J [red]"}, r"bad \x1b[2J \[red]"),
        ("draining", {"flights": 2, "limit_s": 30.0}, "2 running have 30 s to end"),
        ("server-away", {"message": "Nobody."}, "Nobody. Trying until it does."),
        ("server-back", {}, "answers again"),
        ("start-failed", {"message": "No [b]"}, r"No \[b]"),
        ("stopped", {}, "stopped"),
        (
            "registered",
            {"worker": "wrk_1", "functions": [{"name": "a", "durable": True}, {"name": "b", "durable": False}]},
            "serves a, b (plain)",
        ),
    ],
)
def test_events_in_words(kind: str, fields: dict[str, Any], words: str) -> None:
    """What a handler has said is escaped: it may hold anything."""
    assert words in line(kind, fields)


def test_events_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    Teller(as_json=True)("ended", **FLIGHT, message="a\nb")
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert told.pop("at").endswith("+00:00") and said.out.count("\n") == 1 and not said.err
    assert told == {"event": "ended", **FLIGHT, "message": "a\nb"}
    Teller(as_json=False)("stopped")
    said = capsys.readouterr()
    assert (said.out, said.err.strip()) == ("", "stopped")
