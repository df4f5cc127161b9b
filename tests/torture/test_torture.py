"""The short form of the torture suite, and of its command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from perdure.core.crashpoints import CrashPoint
from perdure.core.errors import InvalidRequest
from tests.torture import registry, suite
from tests.torture.damage_rounds import LateCommands
from tests.torture.life import STEPS
from tests.torture.model import GOAL, ROUNDS, TRIES_MAX, Outcome, Table, together
from tests.torture.suite import USUAL, Plan, run, unreachable

ROOT = Path(__file__).resolve().parent.parent.parent
SEED = 11
ROUNDS_OF_FILES = 14  # each has several faults
ROUNDS_OF_KILLS = 5
UPGRADE = ("set-aside", "switched", "answers", "let-go")  # a run of 200 rounds has all


@pytest.mark.timeout(600)
async def test_files_survive_power_cuts_full_disks_damage_and_late_commands() -> None:
    table = await run(Plan(ROUNDS_OF_FILES, SEED, kinds=("cuts", "full", "damage", "late", "room", "store")))
    assert table.violations == []
    assert table.rounds == ROUNDS_OF_FILES
    assert all(table.fired[point] for point in table.points), "every point fired"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_servers_and_machines_survive_sigkill_at_named_points_and_at_any_time() -> None:
    points = (
        *(f"{point.value} server" for point in (CrashPoint.WAKE_RECORDED, CrashPoint.START_RESTORED, CrashPoint.START_REPORTED)),
        *(f"{point.value} server" for point in (CrashPoint.CAPTURE_COPIED, CrashPoint.CAPTURE_WRITTEN)),
        *(f"{point.value} server" for point in (CrashPoint.CAPTURE_PUBLISHED, CrashPoint.CAPTURE_REPORTED)),
        *(
            "start.running vmm",
            "capture.paused vmm",
            "capture.copied agent",
            "capture.reported database",
            "kill.working",
            "clock.back",
        ),
    )
    table = await run(Plan(ROUNDS_OF_KILLS, SEED, kinds=("kills",), points=points))
    assert table.violations == []
    assert table.rounds == ROUNDS_OF_KILLS
    assert table.faults >= ROUNDS_OF_KILLS


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_durable_executions_survive_sigkill_of_server_and_database() -> None:
    """Each named point of their service in the long form; here a server where most is at stake, and the database once."""
    named = (
        "batch-committed",
        "claim-committed",
        "lease-taken",
        "timer-due",
        "child-wanted",
        "parent-told",
        "callback-completed",
    )
    points = (*(f"runs.{name} server" for name in named), "runs.answer-committed database")
    table = await run(Plan(3, SEED, kinds=("runs",), points=points))
    assert table.violations == []
    assert table.faults >= 3


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_durable_executions_survive_sigkill_at_every_point() -> None:
    table = await run(Plan(60, SEED, kinds=("runs",)))
    assert table.violations == []
    assert all(table.fired[point] for point in table.points), "every point fired"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_an_upgrade_of_the_database_survives_sigkill_at_its_named_points() -> None:
    table = await run(Plan(1, SEED, kinds=("upgrade",), points=tuple(f"upgrade.{name} server" for name in UPGRADE)))
    assert table.violations == []
    assert table.faults >= 2


@pytest.mark.qemu
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_virtual_machines_survive_sigkill(base_image: Path) -> None:
    table = await run(Plan(24, SEED, kinds=("machines",)))
    assert table.violations == []
    assert table.faults == 24


@pytest.mark.qemu
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_virtual_machine_survives_sigkill_of_its_server_and_of_itself(base_image: Path) -> None:
    table = await run(Plan(2, SEED, kinds=("machines",), points=("vm.server", "vm.capture-vmm")))
    assert table.violations == []
    assert table.faults == 2


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "tests.torture", *arguments]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.timeout(600)
def test_the_command_ends_with_its_line_and_the_table() -> None:
    done = command("--rounds", "2", "--seed", "5", "--only", "late")
    assert done.returncode == 0, done.stderr
    head, *table = done.stdout.splitlines()
    assert head == "rounds=2 faults=14 violations=0 seed=5", "each round delivers every kind of command"
    assert {line.split()[1]: int(line.split()[0]) for line in table} == dict.fromkeys(LateCommands.points, 2)


@pytest.mark.timeout(600)
def test_a_run_that_is_ended_tells_what_it_has_done() -> None:
    words = [sys.executable, "-m", "tests.torture", "--rounds", "1000000", "--seed", "5", "--only", "late"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "seed=5\n"
        assert "ok" in process.stderr.readline(), "one round is done"
        process.terminate()
        told, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.match(r"rounds=\d+ faults=\d+ violations=0 seed=5\n +\d+  late\.stop\n", told)


@pytest.mark.timeout(600)
def test_the_command_fails_when_something_is_violated() -> None:
    done = command("--rounds", "5", "--seed", "5", "--only", "late", "--point", "late.stop", "--defect", "no-generation-check")
    assert done.returncode == 1
    assert "violations=5" in done.stdout
    assert "late.stop" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--rounds", "0"], "0 is no number of rounds"),
        (["--rounds", "many"], "many"),
        (["--defect", "none-such"], "invalid choice: 'none-such'"),
        (["--only", "none-such"], "invalid choice: 'none-such'"),
        (["--only", "late", "--point", "none-such"], "There is no point 'none-such'"),
    ],
)
def test_the_command_refuses_what_makes_no_sense(arguments: list[str], why: str) -> None:
    done = command(*arguments)
    assert done.returncode == 2
    assert why in done.stderr


def test_the_table_says_what_fired() -> None:
    table = Table(3, ("a", "b"))
    table.add(Outcome("a", True))
    table.add(Outcome("a", False))
    table.add(Outcome("b", True, ("it broke",), "at 7"))
    assert table.lines() == ["rounds=3 faults=2 violations=1 seed=3", "     1  a", "     1  b"]
    assert table.violations == ["round 3, b (at 7): it broke"]
    assert table.rarest(1) == []
    assert table.rarest(2) == ["b", "a"]


def test_faults_of_one_round_are_all_counted() -> None:
    faults = [Outcome("a", True, (), "1"), Outcome("b", False), Outcome("c", True, ("it broke",), "at 7")]
    outcome = together("a", faults)
    assert outcome == Outcome("a", True, ("c: it broke",), "at 7", ("c",))
    table = Table(3, ("a", "b", "c"))
    table.add(outcome, seconds=2.0)
    assert table.lines() == ["rounds=1 faults=2 violations=1 seed=3", "     1  a", "     0  b", "     1  c"]
    assert (table.longest, table.longest_s) == ("a", 2.0)


def test_a_point_that_is_silent_is_told_when_there_were_rounds_or_tries_enough() -> None:
    table = Table(3, ("a", "b"))
    for _ in range(GOAL):
        table.add(Outcome("a", True))
        assert table.silent() == []
        table.add(Outcome("b", False))
    assert table.silent() == ["b"], "the rounds were enough for both"
    many = Table(3, tuple(str(number) for number in range(ROUNDS)))
    for _ in range(TRIES_MAX):
        assert many.silent() == []
        many.add(Outcome("7", False))
    assert many.silent() == ["7"], "it was tried and tried"


def test_what_a_module_adds_must_be_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "modules", lambda: [SimpleNamespace(__name__="rounds_x", WORKS=("upload",))])
    assert list(registry.kinds()) == []
    with pytest.raises(TypeError, match="WORKS of rounds_x has 'upload', which is no Work"):
        list(registry.works())


def test_every_named_point_of_the_product_can_be_reached() -> None:
    assert unreachable() == []


def test_a_named_point_that_no_round_can_reach_is_an_error_of_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "STEPS", tuple(step for step in STEPS if step.name != "rewind"))
    assert unreachable() == [CrashPoint.REWIND_ASLEEP, CrashPoint.REWIND_RECORDED]


async def test_a_run_refuses_to_begin_while_a_named_point_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "BIRTH", ("none.",))
    with pytest.raises(InvalidRequest, match=r"No round can reach create\.recorded\."):
        await run(Plan(1, SEED))


def test_kinds_without_virtual_machines_are_the_usual_ones() -> None:
    assert set(USUAL) >= {"cuts", "full", "damage", "late", "kills"}
    assert "machines" not in USUAL
