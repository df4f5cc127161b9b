"""A watch whose hands and events meet in an order that the kernel allows and a busy machine brings about."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from perdure.guest.watches import Watch, Watches, add_directories


class Stage:
    """The agent's loop and hands: what a hand is asked is done when the test says so."""

    def __init__(self, top: Path) -> None:
        self._asked: list[tuple[dict[str, Any], Callable[[str, Any], None]]] = []
        timer = SimpleNamespace(cancel=lambda: None)
        loop = SimpleNamespace(add=lambda *_: None, remove=lambda *_: None, call_later=lambda *_: timer)
        hand = SimpleNamespace(ask=lambda request, answered: self._asked.append((request, answered)))
        hands = SimpleNamespace(take=lambda: hand, give=lambda _: None)
        owner = cast(Watches, SimpleNamespace(loop=loop, hands=hands))
        self.watch = Watch(owner, {"path": str(top), "recursive": True})
        self.watch.add([("", False)])
        self.work()

    def work(self) -> None:
        """The hand does what it was asked."""
        request, answered = self._asked.pop()
        answers: list[tuple[str, Any]] = []
        add_directories(cast(Any, SimpleNamespace(say=lambda tag, value: answers.append((tag, value)))), request)
        answered(*answers[0])

    def read(self) -> None:
        self.watch._on_ready(0)

    @property
    def told(self) -> list[tuple[str, str]]:
        events = [json.loads(line) for line in self.watch.lines]
        return [(event["kind"], event["path"].removeprefix(self.watch.shown)) for event in events]


def test_what_is_made_before_a_renamed_directory_is_watched_is_told(tmp_path: Path) -> None:
    """The rename overtakes the hand that was to watch the directory: nothing watches what lies in it until another comes."""
    (tmp_path / "deep").mkdir()
    stage = Stage(tmp_path)
    (tmp_path / "a/b").mkdir(parents=True)
    stage.read()
    (tmp_path / "a").rename(tmp_path / "deep/a")
    stage.work()  # finds no /a any more
    stage.read()
    (tmp_path / "deep/a/b/new").mkdir()
    stage.work()
    (tmp_path / "deep/a/b/newer").mkdir()
    stage.read()
    assert stage.told == [
        ("created", "/a"),
        ("renamed", "/deep/a"),
        ("created", "/deep/a/b"),
        ("created", "/deep/a/b/new"),
        ("created", "/deep/a/b/newer"),
    ]
    stage.watch.stop()


def test_what_was_told_is_not_told_again_for_a_rename(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/f").touch()
    stage = Stage(tmp_path)
    (tmp_path / "a").rename(tmp_path / "z")
    stage.read()
    stage.work()
    assert stage.told == [("renamed", "/z")]
    stage.watch.stop()
