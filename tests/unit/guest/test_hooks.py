"""Which programs are hooks, and what the host believes of what a guest says about them. Running them: tests/contract/guest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from perdure.guest import hooks
from perdure.machines import guestlink_hooks
from perdure.machines.guestlink_hooks import HookLimits
from perdure.wire.guest.ops import HOOK_OUTPUT_BYTES, HOOKS_MAX
from perdure.wire.node import HookOutcome, HookRun, MemoryFate, Told


class Heard:
    """A worker's end that keeps what is said."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}

    def say(self, **fields: Any) -> None:
        self.said = fields


def found(monkeypatch: pytest.MonkeyPatch, directory: Path, stranger: int = 0) -> dict[str, Any]:
    monkeypatch.setattr(hooks, "DIRECTORY", str(directory))
    monkeypatch.setattr(hooks, "OWNER", os.geteuid() + stranger)
    heard = Heard()
    hooks.find(heard)  # type: ignore[arg-type]
    return heard.said


def program(path: Path, mode: int = 0o755) -> None:
    path.write_text("#!/bin/sh\n")
    path.chmod(mode)


# -------------------------------------------------------------------------------------------------------------- the guest


def test_there_may_be_hooks_only_where_their_directory_or_a_link_is(tmp_path: Path) -> None:
    root = tmp_path / "user"
    (root / "etc").mkdir(parents=True)
    assert not hooks.may_exist(str(root))
    (root / "etc/perdure").mkdir()
    assert not hooks.may_exist(str(root))
    (root / "etc/perdure/on-wake.d").write_text("a file")
    assert not hooks.may_exist(str(root))
    (root / "etc/perdure/on-wake.d").unlink()
    (root / "etc/perdure/on-wake.d").symlink_to("/opt/hooks")
    assert hooks.may_exist(str(root))
    (root / "etc/perdure/on-wake.d").unlink()
    (root / "etc/perdure/on-wake.d").mkdir()
    assert hooks.may_exist(str(root))


def test_hooks_are_the_executables_in_the_order_of_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("20-b", "10-a", "9-last.sh", ".hidden", "30-c~", "40-d.dpkg-old", "50-d.bak", "with space"):
        program(tmp_path / name)
    program(tmp_path / "README", 0o644)
    (tmp_path / "15-directory").mkdir()
    (tmp_path / "16-link").symlink_to("20-b")
    (tmp_path / "17-dangling").symlink_to("none")
    said = found(monkeypatch, tmp_path)
    assert [hook["name"] for hook in said["hooks"]] == ["10-a", "16-link", "20-b", "9-last.sh"]
    assert {hook["refused"] for hook in said["hooks"]} == {""} and said["more"] == 0


def test_what_others_than_root_can_change_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "10-open", 0o757)
    program(tmp_path / "20-fine")
    assert [hook["refused"] for hook in found(monkeypatch, tmp_path)["hooks"]] == [
        "It was not run: others than root may write to the file.",
        "",
    ]
    assert all("belongs to user" in hook["refused"] for hook in found(monkeypatch, tmp_path, stranger=1)["hooks"])
    tmp_path.chmod(0o777)
    assert all("write to its directory" in hook["refused"] for hook in found(monkeypatch, tmp_path)["hooks"])


def test_too_many_hooks_are_counted_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(HOOKS_MAX + 3):
        program(tmp_path / f"{number:03}")
    said = found(monkeypatch, tmp_path)
    assert (len(said["hooks"]), said["more"]) == (HOOKS_MAX, 3)


def test_a_directory_that_went_away_holds_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, tmp_path / "none") == {"hooks": [], "more": 0}


# --------------------------------------------------------------------------------------------------------------- the host


def test_a_wake_tells_the_report_and_the_limits_or_nothing() -> None:
    assert guestlink_hooks.telling(None, HookLimits()) == {}
    told = guestlink_hooks.telling({"memory": "kept"}, HookLimits(1.0, 2.0))
    assert told == {"resume": {"memory": "kept"}, "hooks": {"each_s": 1.0, "all_s": 2.0}}


def test_an_agent_that_answers_without_a_word_on_hooks_is_an_old_one() -> None:
    told = guestlink_hooks.telling({}, HookLimits())
    assert guestlink_hooks.silence(told, {"hooks": []}) == ()
    (sentence,) = guestlink_hooks.silence(told, {})
    assert "earlier release" in sentence and sentence.endswith(".")
    assert guestlink_hooks.silence({}, {}) == ()


def test_what_a_guest_says_of_its_hooks_is_cut_to_size_and_made_safe() -> None:
    row = {"name": "10-a", "outcome": "failed", "exit_code": 3, "ms": 1500, "output": "one\ntwo\x1b[31m"}
    liar = {"name": "x\x00" * 99, "outcome": "splendid", "exit_code": "nine", "ms": float("nan"), "output": "y" * 9999}
    honest, cut = guestlink_hooks.runs([row, liar, "no row", None])
    assert honest == HookRun("10-a", HookOutcome.FAILED, 3, 1.5, "one\ntwo\N{REPLACEMENT CHARACTER}[31m")
    assert (len(cut.name), cut.outcome, cut.exit_code, cut.seconds) == (64, HookOutcome.FAILED, -1, 0.0)
    assert len(cut.output) == HOOK_OUTPUT_BYTES
    assert guestlink_hooks.runs({"not": "a list"}) == guestlink_hooks.runs(None) == ()
    assert len(guestlink_hooks.runs([row] * 1000)) == HOOKS_MAX


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (Told({}), (MemoryFate.KEPT, "")),
        (Told({}, rewound="on request"), (MemoryFate.KEPT, "rewound: on request")),
        (Told({}, memory_lost="no snapshot", rewound="on request"), (MemoryFate.LOST, "no snapshot")),
    ],
)
def test_what_only_the_control_plane_knows_of_memory_comes_first(told: Told, expected: tuple[MemoryFate, str]) -> None:
    assert told.memory(MemoryFate.KEPT, "") == expected
    assert Told({}, rewound="x").memory(MemoryFate.LOST, "fingerprint: kernel") == (MemoryFate.LOST, "fingerprint: kernel")
