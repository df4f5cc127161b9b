"""The command against a real server over fake services: what people and scripts see."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.main import main
from perdure.sdk import Workspace
from perdure.wire.node import ExecEnd, FileKind
from tests.fakes.api_server import FakeServer
from tests.fakes.memory_guest import Node

Run = Callable[..., "Answer"]
PROGRAM = [sys.executable, "-m", "perdure.cli.main"]


class Answer:
    """What one command line did."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        return json.loads(self.err)["error"]


@pytest.fixture
def perdure(server: FakeServer, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line in this process, against the fake server."""
    monkeypatch.setenv("PERDURE_HOME", str(server.settings.home))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    monkeypatch.setattr("sys.stdin.fileno", lambda: os.open(os.devnull, os.O_RDONLY), raising=False)

    def run(line: str, *more: str) -> Answer:
        capfdbinary.readouterr()
        code = main([*line.split(), *more])
        sys.stdout.flush()
        out, err = capfdbinary.readouterr()
        return Answer(code, out.decode(), err.decode())

    return run


def environment(server: FakeServer) -> dict[str, str]:
    return {**os.environ, "PERDURE_HOME": str(server.settings.home)}


# ------------------------------------------------------------------------------------------------------------ human output


def test_human_output(perdure: Run) -> None:
    made = perdure("create demo --memory-mib 1024 --metadata a=b")
    assert made.out == "demo is awake: base, 1024 MiB, 1 CPU, 8 GiB disk, vm-emulated\n"
    assert made.err == ""
    listing = re.sub(r"\d+ d ago", "N d ago", perdure("ls").out)
    assert listing == ("NAME  STATE    KIND       IMAGE    MEMORY  ACTIVE\ndemo  running  workspace  base   1024 MiB  N d ago\n")
    assert perdure("sleep demo").out == "demo sleeps: 4.2 MB written\n"
    assert perdure("wake demo").out == "demo is awake: memory kept, disk kept, asleep 60 min\n"
    assert perdure("checkpoint demo").out.endswith("paused 15 ms, 4.2 MB written\n")
    assert perdure("fork demo --name left --name right").out == "left is awake\nright is awake\n"
    assert perdure("resize demo --disk-gib 20").out == "demo has 20 GiB from its next disk boot on\n"
    assert perdure("keep-awake demo 3600").out == "demo stays awake for 60 min\n"
    assert perdure("recover demo --how disk-boot").out == "demo is awake: memory lost (requested), disk kept\n"
    gone = perdure("rm left right --yes").out.splitlines()
    assert [line.partition(" ws_")[0] for line in gone] == [
        "left is deleted; its thread stays: perdure log",
        "right is deleted; its thread stays: perdure log",
    ]
    assert "is read by its id" in perdure("log left").err
    assert "memory" in perdure(f"log {gone[0].rpartition(' ')[2]}").out


def test_show(perdure: Run) -> None:
    perdure("create demo --metadata user=7")
    assert perdure("show demo").out == (
        "demo\n"
        "  id           ws_00000000000000000000000001\n"
        "  state        running\n"
        "  generation   1\n"
        "  image        base, 512 MiB, 1 CPU, 8 GiB disk\n"
        "  isolation    vm-emulated: jail, seccomp, own user, memory limit, cpu limit, pids limit\n"
        "               no readonly base: QEMU before 8.2\n"
        "  stored       nothing yet\n"
        "  in use       last used 3 min ago; sleeps in 12 min if nobody uses it\n"
        "  sleeps after 15 min\n"
        "  checkpoints  every 60 s\n"
        "  may reach    nothing\n"
        "  metadata     user=7\n"
        "  created      2026-01-02T03:04:05+00:00\n"
        "  last wake    memory new, disk new\n"
    )


def test_log_and_snapshots(perdure: Run) -> None:
    perdure("create demo")
    perdure("checkpoint demo --name before")
    assert perdure("log demo").out == (
        "SEQ  TIME (UTC)           WHAT        DETAIL\n"
        "  1  2026-01-02 03:04:05  awake       memory new\n"
        "  2  2026-01-02 03:04:05  checkpoint  named before; snp_00000000000000000000000002\n"
    )
    shown = re.sub(r"\d+ d ago", "N d ago", perdure("show demo").out)
    assert "  stored       7.3 MB besides the image: 5.2 MB memory, 2.1 MB disk; 1 snapshot\n" in shown
    assert "  snapshot     snp_00000000000000000000000002, requested (before), N d ago\n" in shown
    assert "*  before  requested  local    head, named, requested  3.1 MB  4.2 MB  7.3 MB  " in perdure("snapshots ls demo").out


def test_empty_lists_say_what_to_do(perdure: Run, server: FakeServer) -> None:
    server.images.images.clear()
    assert perdure("ls").out == "No workspaces. Make one with 'perdure create NAME'.\n"
    assert perdure("images ls").out == "No images. Build one with 'perdure image build NAME': base, node.\n"


# -------------------------------------------------------------------------------------------------------------------- json


def test_every_command_prints_one_document(perdure: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    commands = [
        ("create demo", "workspace"),
        ("ls", "workspaces"),
        ("show demo", "workspace"),
        ("exec demo echo hi", "exit_code"),
        (f"cp {tmp_path / 'file'} demo:/root/", "files"),
        ("sleep demo", "snapshot"),
        ("wake demo", "report"),
        ("checkpoint demo", "pause_s"),
        ("fork demo -n 1", "results"),
        ("log demo", "entries"),
        ("snapshot ls demo", "snapshots"),
        ("keep-awake demo 5", "keep_awake_until"),
        ("resize demo --disk-gib 9", "disk_gib"),
        ("recover demo", "report"),
        ("image ls", "images"),
        ("image prune", "removed"),
        ("up --systemd", "unit"),
        ("rm demo-1 -y", "deleted"),
    ]
    for number, (line, key) in enumerate(commands):
        command, _, rest = line.partition(" ")
        if command in {"snapshot", "image"}:  # the noun has its verb first
            verb, _, rest = rest.partition(" ")
            command = f"{command} {verb}"
        before = number % 2
        answer = perdure(f"--json {line}" if before else f"{command} --json {rest}")
        assert (answer.code, answer.err) == (0, ""), line
        assert key in answer.json, line


def test_errors_are_json_too(perdure: Run) -> None:
    perdure("create demo")
    for line, code, status in [
        ("create demo", "already_exists", 1),
        ("create x --image none", "not_found", 1),
        ("create x --memory-mib 1", "invalid_request", 1),
        ("create x -e nonsense", "invalid_request", 1),
        ("show none", "not_found", 1),
        ("exec none true", "not_found", 125),
        ("cp a b", "invalid_request", 1),
        ("cp demo:/none /tmp/x", "not_found", 1),
        ("rm demo", "invalid_request", 1),
        ("frobnicate", "usage", 2),
        ("create", "usage", 2),
        ("resize demo --disk-gib many", "usage", 2),
    ]:
        answer = perdure(f"--json {line}")
        assert (answer.code, answer.error["code"], answer.out) == (status, code, ""), line
        assert answer.error["message"].endswith("."), line
    assert perdure("ls").out.count("demo") == 1


@pytest.mark.parametrize("group", ["", "snapshot", "branch", "image"])
def test_a_group_alone_shows_its_commands_and_says_what_is_missing(perdure: Run, group: str) -> None:
    answer = perdure(group)
    assert answer.code == 2
    assert "Commands" in answer.out + answer.err
    assert answer.err.endswith("Error: Missing command.\nTry 'perdure --help', or --help after the command.\n")
    for line in (f"--json {group}", f"{group} --json"):
        alone = perdure(line)
        assert (alone.code, alone.out, alone.error["message"]) == (2, "", "Missing command.")


def test_json_may_stand_between_a_noun_and_its_verb(perdure: Run) -> None:
    assert "images" in perdure("image --json ls").json
    assert perdure("snapshot --json ls none").error["code"] == "not_found"


def test_no_server_is_one_sentence(monkeypatch: pytest.MonkeyPatch, home: Path, perdure: Run) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(home))
    answer = perdure("ls")
    assert (answer.code, answer.err) == (
        1,
        f"Error: No Perdure server answers at {home}/run/api.sock.\nRun 'perdure up', or set PERDURE_URL and PERDURE_API_KEY.\n",
    )
    assert perdure("exec demo true").code == 125


def test_bad_settings_are_one_sentence(monkeypatch: pytest.MonkeyPatch, perdure: Run) -> None:
    monkeypatch.setenv("PERDURE_POOL_SIZE", "many")
    answer = perdure("down --json")
    assert answer.error["message"].startswith("The setting PERDURE_POOL_SIZE is not valid: Input should be a valid integer")


def test_defect_is_one_sentence(monkeypatch: pytest.MonkeyPatch, perdure: Run) -> None:
    def broken(*_: object, **__: object) -> object:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(Workspace, "iterate", broken)
    answer = perdure("ls")
    assert answer.code == 1
    assert answer.err.startswith("Error: perdure failed because of a defect of its own (ZeroDivisionError: oops).\n")
    assert "Traceback" not in answer.err


# -------------------------------------------------------------------------------------------------------------------- exec


def test_exec_is_transparent(perdure: Run) -> None:
    perdure("create demo")
    answer = perdure("exec demo -- exit 7")
    assert (answer.code, answer.out, answer.err) == (7, "", "")
    assert perdure("exec --shell demo", "echo a; warn b").out == "a\n"
    assert perdure("exec --shell demo", "echo a; warn b").err == "b\n"
    assert perdure("exec --cwd /srv -u me -e A=1 demo", "--shell", "pwd; whoami; env A").out == "/srv\nme\n1\n"
    missing = perdure("exec demo nope")
    assert (missing.code, missing.err) == (127, "The command could not be started. (there is no command 'nope')\n")
    limited = perdure("exec --run-limit 0.05 demo hang")
    assert (limited.code, limited.err.count("limit") == 1) == (143, True)
    assert "There is no command to run." in perdure("exec demo").err


def test_exec_json_keeps_bytes(perdure: Run) -> None:
    perdure("create demo")
    answer = perdure("exec --json demo bytes ff41").json
    assert (answer["stdout"], answer["stdout_base64"], answer["exit_code"]) == ("�A", "/0E=", 0)


def test_exec_detached_and_attached(perdure: Run, server: FakeServer) -> None:
    perdure("create demo")
    exec_id = perdure("exec -d demo hang").out.strip()
    waiting = perdure(f"exec --timeout 0.05 --attach {exec_id} demo")
    assert (waiting.code, f"exec demo --attach {exec_id}" in waiting.err) == (125, True)
    assert server.workspaces.world("demo").commands[exec_id].exited is None


def test_exec_tells_when_waking_lost_something(perdure: Run, server: FakeServer) -> None:
    perdure("create demo")
    perdure("sleep demo")
    original = server.workspaces._start

    def lossy(row: Any, memory: Any, **report: Any) -> Any:
        report["memory_reason"] = "fingerprint: QEMU changed"
        return original(row, type(memory)("lost"), **report)

    server.workspaces._start = lossy  # type: ignore[method-assign]
    try:
        answer = perdure("exec demo echo hi")
    finally:
        del server.workspaces._start  # type: ignore[method-assign]
    assert answer.out == "hi\n"
    assert "demo woke: memory lost (fingerprint: QEMU changed), disk kept" in answer.err


def test_piped_stdin_and_raw_bytes(server: FakeServer, demo: Workspace) -> None:
    data = bytes(range(256)) * 10_000
    command = [*PROGRAM, "exec", "demo", "cat"]
    done = subprocess.run(command, input=data, capture_output=True, env=environment(server), timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, data, b"")


def test_closed_pipe_ends_the_command_quietly(server: FakeServer, demo: Workspace) -> None:
    with subprocess.Popen(
        [*PROGRAM, "exec", "-I", "demo", "spew", "20000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(server),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(10) == b"x" * 10
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (141, b"")


@pytest.mark.parametrize(("arguments", "said", "end"), [([], b"was ended", ExecEnd.KILLED), (["--attach"], b"goes on", None)])
def test_interrupt(server: FakeServer, demo: Workspace, arguments: list[str], said: bytes, end: ExecEnd | None) -> None:
    """Ctrl-C ends the command that this program started, and leaves alone one that it only watches."""
    words = ["demo", "hang"]
    if arguments:
        words = [*arguments, demo.commands.run("hang", background=True).exec_id, "demo"]
    with subprocess.Popen([*PROGRAM, "exec", "-I", *words], stderr=subprocess.PIPE, env=environment(server)) as process:
        row = server.workspaces.find_row("demo")
        server.wait_for(lambda: server.workspaces.held.get(row.id, 0) == 1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err.count(b"\n"), said in err) == (130, 1, True), err
    (ran,) = server.workspaces.world("demo").commands.values()
    assert (ran.exited.end if ran.exited else None) == end


def test_program_that_is_killed_leaves_the_command_running(server: FakeServer, demo: Workspace) -> None:
    with subprocess.Popen([*PROGRAM, "exec", "-I", "demo", "hang"], env=environment(server)) as process:
        row = server.workspaces.find_row("demo")
        server.wait_for(lambda: server.workspaces.held.get(row.id, 0) == 1)
        process.kill()
    server.wait_for(lambda: server.workspaces.held[row.id] == 0)
    (command,) = server.workspaces.world("demo").commands.values()
    assert command.exited is None


# ---------------------------------------------------------------------------------------------------------------------- cp


def test_cp_both_ways(perdure: Run, tmp_path: Path) -> None:
    perdure("create demo")
    (tmp_path / "dir/sub").mkdir(parents=True)
    (tmp_path / "dir/sub/file").write_text("content")
    assert perdure(f"cp {tmp_path}/dir demo:/root").out == "1 file copied, 7 B\n"
    assert perdure(f"cp {tmp_path}/dir/sub/file demo:renamed").code == 0
    assert perdure(f"cp demo:/root/dir {tmp_path}").code == 0  # into itself: the same tree again
    assert perdure(f"cp demo:/root/dir {tmp_path}/exact").code == 0
    assert (tmp_path / "exact/sub/file").read_text() == "content"
    assert perdure(f"cp demo:renamed {tmp_path}/").code == 0
    assert (tmp_path / "renamed").read_text() == "content"
    assert perdure("cp demo:renamed -").out == "content"
    assert "Exactly one of the two" in perdure("cp demo:/a demo:/b").err
    assert "no local file" in perdure(f"cp {tmp_path}/none demo:/root/").err


def test_cp_from_a_hostile_workspace(perdure: Run, server: FakeServer, tmp_path: Path) -> None:
    perdure("create demo")
    files = server.workspaces.world("demo").files
    files["/bad"] = Node(FileKind.DIRECTORY, mode=0o777)
    files["/bad/good"] = Node(FileKind.FILE, bytearray(b"fine"), mode=0o4755)
    files["/bad/.."] = Node(FileKind.FILE, bytearray(b"evil"))
    files["/bad/passwd"] = Node(FileKind.SYMLINK, target="/etc/passwd")
    files["/bad/up"] = Node(FileKind.SYMLINK, target="../../evil")
    files["/bad/near"] = Node(FileKind.SYMLINK, target="good")
    files["/bad/null"] = Node(FileKind.OTHER)
    files["/bad/red\x1b[31m"] = Node(FileKind.OTHER)
    target = tmp_path / "cage" / "here"
    target.parent.mkdir()
    answer = perdure(f"cp demo:/bad {target}")
    assert answer.code == 1
    assert answer.out == "1 file copied, 4 B\n"
    assert sorted(answer.err.splitlines()) == [
        "skipped ..: its name is not a file name",
        "skipped null: it is a device, socket or pipe",
        "skipped passwd: it is a link to an absolute path",
        "skipped red\\x1b[31m: it is a device, socket or pipe",
        "skipped up: it is a link that could lead out of the destination",
    ]
    assert sorted(path.name for path in target.iterdir()) == ["good", "near"]
    assert [path.name for path in target.parent.iterdir()] == ["here"]
    assert (target / "good").stat().st_mode & 0o7777 == 0o755
    files.update({f"/bad/{number:02}": Node(FileKind.OTHER) for number in range(30)})
    assert perdure(f"cp demo:/bad {target}").err.splitlines()[-2:] == [
        "skipped 18: it is a device, socket or pipe",
        "skipped 15 more; --json names them all",
    ]
    files["/huge"] = Node(FileKind.FILE, bytearray(b"x"), declared_size=1 << 60)
    huge = perdure(f"cp demo:/huge {tmp_path}/huge")
    assert (huge.code, "bytes and" in huge.err, (tmp_path / "huge").exists()) == (1, True, False)


def test_listings_escape_what_a_workspace_says(perdure: Run, server: FakeServer) -> None:
    perdure("create demo")
    row = server.workspaces.find_row("demo")
    server.workspaces._put(row, state_detail="\x1b]0;owned\x07 [bold]x[/]", metadata={"a": "\u202e\x1b[2J"})
    shown = perdure("show demo").out
    assert "\x1b" not in shown
    assert "\\x1b]0;owned\\x07 [bold]x[/]" in shown
    assert "\\u202e\\x1b[2J" in shown
    assert "\x1b" not in perdure("show demo --json").out


# ------------------------------------------------------------------------------------------------------------ rm, up, down


def test_rm_asks(perdure: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    perdure("create demo")
    monkeypatch.setattr("perdure.cli.workspaces.sys.stdin", io.StringIO("no\n"))
    monkeypatch.setattr("perdure.cli.workspaces.sys.stdin.isatty", lambda: True)
    refused = perdure("rm demo")
    assert (refused.code, "Nothing was deleted" in refused.err) == (1, True)
    monkeypatch.setattr("perdure.cli.workspaces.sys.stdin", io.StringIO("y\n"))
    monkeypatch.setattr("perdure.cli.workspaces.sys.stdin.isatty", lambda: True)
    assert perdure("rm demo").out.startswith("demo is deleted; its thread stays: perdure log ws_")
    assert perdure("rm demo none --yes").code == 1


def test_rm_says_which_branches_stay(perdure: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    perdure("create demo")
    perdure("fork demo --name left --name right")
    perdure("fork left --name deeper")
    monkeypatch.setattr("perdure.cli.workspaces.sys.stdin", io.StringIO("no\n"))
    monkeypatch.setattr("perdure.cli.workspaces.sys.stdin.isatty", lambda: True)
    assert "all snapshots? The branches left, deeper, right stay. This cannot be undone." in perdure("rm demo").err
    gone = perdure("rm left --yes").out
    assert gone.startswith("left is deleted; its branch deeper stays; its thread stays: perdure log ws_")
    answer = perdure("rm demo deeper --yes --json").json
    assert len(answer["deleted"]) == 2
    assert [branch["name"] for branch in answer["branches"]] == ["right"], "what goes with it does not stay"
    assert perdure("rm right --yes --json").json["branches"] == []


def test_forward_serves_until_interrupted(server: FakeServer, demo: Workspace) -> None:
    command = [*PROGRAM, "forward", "demo", "0:80", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(server)) as process:
        assert process.stdout is not None
        opened = json.loads(process.stdout.readline())["forwards"]
        assert (opened[0]["port"], opened[0]["local_port"] > 0) == (80, True)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, b"Traceback" in err, err.count(b"\n")) == (0, False, 1)


def test_down_stops_the_process_that_answers(home: Path, perdure: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says what that process put to sleep: more than was awake when it was asked, if another has begun meanwhile."""
    script = (
        "import asyncio, signal, sys\n"
        "from pathlib import Path\n"
        "from perdure.api.server import ApiServer\n"
        "from perdure.core.config import Settings\n"
        "from perdure.core.stop import StopReport\n"
        "from tests.fakes.workspaces import fake_services\n"
        "async def serve():\n"
        "    settings = Settings(home=Path(sys.argv[1]), listen_port=0)\n"
        "    server = ApiServer(fake_services(settings)[0])\n"
        "    await server.start()\n"
        "    stop = asyncio.Event()\n"
        "    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)\n"
        "    print('ready', flush=True)\n"
        "    await stop.wait()\n"
        "    await server.stop()\n"
        "    StopReport(asleep=('demo', 'other')).write(settings.stop_file)\n"
        "asyncio.run(serve())\n"
    )
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", script, str(home)], stdout=subprocess.PIPE, cwd=root) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        monkeypatch.setenv("PERDURE_HOME", str(home))
        perdure("create demo")
        assert perdure("down").out == "Stopped; 2 workspaces were hibernated.\n"
        assert process.wait(60) == 0
    assert "No Perdure server answers" in perdure("down").err


def test_up_refuses_a_second_server(perdure: Run) -> None:
    answer = perdure("up --detach")
    assert (answer.code, "runs already" in answer.err) == (1, True)


def test_up_that_fails_says_why(perdure: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(home / "new"))
    failing = [sys.executable, "-c", "import sys; print('the database is broken', file=sys.stderr); sys.exit(3)"]
    monkeypatch.setattr("perdure.cli.daemon.command", lambda: failing)
    answer = perdure("up --detach")
    assert answer.code == 1
    assert "ended with exit code 3 while it started: the database is broken" in answer.err


@pytest.mark.parametrize("words", ["up", "up --detach"])
def test_up_in_a_home_that_cannot_be_is_one_sentence(
    perdure: Run, home: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    file = home / "file"
    file.write_text("")
    nowhere = Path("/proc/none")
    for place, why in ((file, f"{file}: File exists"), (file / "below", f"{file}: File"), (nowhere, f"{nowhere}: No such file")):
        monkeypatch.setenv("PERDURE_HOME", str(place))
        answer = perdure(words)
        assert answer.code == 1
        assert answer.err.startswith(f"Error: The home {place} cannot be made: {why}"), answer.err
        assert "Set PERDURE_HOME" in answer.err


def test_unit_keeps_the_machines_alive_until_they_sleep(perdure: Run) -> None:
    unit = perdure("up --systemd").out
    assert "KillMode=mixed" in unit
    assert "TimeoutStopSec=120" in unit
