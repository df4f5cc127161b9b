"""What the issue calls bad input, through the real command line and SDK: one clear sentence each, and nothing is lost.

Every test ends by looking whether the workspace still is what it was: the same boot, the same process, the same file.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from perdure.core.errors import InvalidRequest, NotFound, PathEscape
from perdure.sdk import CommandHandle, StillRunning, Workspace
from tests.e2e.live import Live, attempt, interrupt, serving, shell, until

pytestmark = [pytest.mark.qemu, pytest.mark.slow, pytest.mark.timeout(900)]

MIB = 1 << 20
#: Bytes that are no UTF-8, some of them what a terminal would obey.
RAW = b"\xff\xfe\x00\x1b[31mred\x1b]0;title\x07\xc3(\xed\xa0\x80\n"
#: The short form uploads less than the issue's 1 GB; PERDURE_TEST_LONG=1 uploads all of it.
UPLOAD_MIB = 1024 if os.environ.get("PERDURE_TEST_LONG") else 96
SERVER_GROWTH_MIB = 48


@pytest.fixture(scope="module")
def live(base_image: Path) -> Iterator[Live]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def patient(live: Live) -> Workspace:
    """A workspace with a process and a file that nothing below may cost it."""
    made = live.workspace("patient", checkpoint_interval_s=0)
    shell(made, "echo kept >/root/kept; nohup sleep 100000 >/dev/null 2>&1 & echo $! >/run/pid")
    return made


@pytest.fixture
def workspace(patient: Workspace) -> Iterator[Workspace]:
    """``patient``; afterwards it must be as it was, in the same generation."""
    before = patient.refresh()
    marks = "cat /root/kept /run/pid /proc/sys/kernel/random/boot_id; kill -0 $(cat /run/pid)"
    kept = shell(patient, marks)
    yield patient
    assert shell(patient, marks) == kept
    after = patient.refresh()
    assert (after.state, after.generation) == (before.state, before.generation)


# ------------------------------------------------------------------------------------------------------------- creation


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["--image", "nope"], "not_found", "There is no image 'nope' here"),
        (["--memory-mib", "127"], "invalid_request", "127 MiB"),
        (["--allow", "example.org"], "invalid_request", "'example.org' has no port"),
        pytest.param(["--memory-mib", "16"], "invalid_request", "16", marks=pytest.mark.long),
        pytest.param(["--vcpus", "255"], "invalid_request", "255", marks=pytest.mark.long),
        pytest.param(["--disk-gib", "1"], "invalid_request", "1 GiB", marks=pytest.mark.long),
        pytest.param(["--env", "NOVALUE"], "invalid_request", "is not KEY=VALUE", marks=pytest.mark.long),
    ],
)
def test_a_create_that_cannot_be_leaves_nothing(
    live: Live, workspace: Workspace, options: list[str], code: str, sentence: str
) -> None:
    answer = live.run("create", "wrong", *options, "--json")
    assert answer.error["code"] == code
    assert sentence in answer.error["message"]
    assert live.run("show", "wrong", "--json").error["code"] == "not_found", "the name is free"
    spoken = live.run("create", "wrong", *options)
    assert spoken.complaint.splitlines()[-2:] == [f"Error: {answer.error['message']}", answer.error["hint"]]


def test_a_name_that_is_none(live: Live, workspace: Workspace) -> None:
    error = live.run("create", "--json", "--", "-dash").error
    assert error["code"] == "invalid_request"
    for name in ("Upper", "a/b", "-dash", "a" * 200, "../up", "a@lost-1", ""):
        with pytest.raises(InvalidRequest):
            live.workspace(name)
    assert len(live.ok("ls", "--json").json["workspaces"]) == 1


def test_a_name_twice(live: Live, workspace: Workspace) -> None:
    error = live.run("create", "patient", "--json").error
    assert (error["code"], error["retryable"]) == ("already_exists", False)
    assert "'patient'" in error["message"]
    assert live.ok("create", "patient", "--exist-ok", "--json").json["workspace"]["id"] == workspace.id


def test_two_clients_create_one_name_at_once(live: Live, workspace: Workspace) -> None:
    """Exactly one gets it; the other is told; the one that exists works."""
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: live.run("create", "twin", "--json"), range(2)))
    refused, made = sorted(answers, key=lambda answer: answer.code == 0)
    assert refused.error["code"] == "already_exists"
    twin = Workspace.connect(made.json["workspace"]["id"], client=live.client)
    assert shell(twin, "echo alive") == "alive"
    twin.delete()


def test_a_command_on_a_workspace_that_does_not_exist(live: Live, workspace: Workspace) -> None:
    answer = live.run("exec", "nobody", "--json", "--", "true")
    assert (answer.error["code"], answer.code) == ("not_found", 125)


# ------------------------------------------------------------------------------------------------------------- commands


def test_a_command_that_does_not_exist(live: Live, workspace: Workspace) -> None:
    spoken = live.run("exec", "patient", "--", "no-such-command")
    assert (spoken.code, spoken.out) == (127, b"")
    assert spoken.complaint.count("\n") == 1
    assert "There is no command 'no-such-command' in the workspace." in spoken.complaint
    told = live.run("exec", "patient", "--json", "--", "no-such-command").json
    assert (told["end"], told["exit_code"]) == ("not-started", 127)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--user", "nobody-here"], "There is no user 'nobody-here'"),
        (["--cwd", "/no/where"], "'/no/where' cannot be entered"),
    ],
)
def test_a_user_or_directory_that_does_not_exist(live: Live, workspace: Workspace, options: list[str], words: str) -> None:
    answer = live.run("exec", *options, "patient", "--", "true")
    assert answer.code == 126
    assert words in answer.complaint


def test_output_is_bytes_whatever_they_are(live: Live, workspace: Workspace) -> None:
    line = f"echo {base64.b64encode(RAW).decode()} | base64 -d | tee /dev/stderr"
    answer = live.run("exec", "patient", "--shell", line)
    assert (answer.code, answer.out, answer.err) == (0, RAW, RAW)
    told = live.run("exec", "patient", "--json", "--shell", line).json
    assert base64.b64decode(told["stdout_base64"]) == RAW
    assert told["stdout"] == RAW.decode(errors="replace")
    done = attempt(workspace, line)
    assert (done.stdout_bytes, done.stderr_bytes) == (RAW, RAW)
    assert live.run("exec", "patient", "--", "cat", stdin=RAW).out == RAW


@pytest.mark.parametrize(("option", "end"), [
    ("--run-limit", "run-limit"),
    pytest.param("--idle-limit", "idle-limit", marks=pytest.mark.long),
])  # fmt: skip
def test_a_limit_ends_a_command_and_all_that_it_started(live: Live, workspace: Workspace, option: str, end: str) -> None:
    line = f"echo begun; sleep 54321 & sleep 54321; echo {end}"
    answer = live.run("exec", option, "2", "patient", "--shell", line)
    assert (answer.code, answer.text) == (143, "begun")
    assert "its limit of 2 s" in answer.complaint and answer.complaint.count("\n") == 1
    told = live.run("exec", "--json", option, "2", "patient", "--shell", line)
    assert (told.json["end"], told.json["stdout"], told.code) == (end, "begun\n", 143)
    assert attempt(workspace, "pgrep -f 'sleep 5432[1]'").exit_code == 1


def test_a_wait_that_ends_does_not_end_the_command(live: Live, workspace: Workspace) -> None:
    line = "echo first; until [ -e /run/go ]; do sleep 0.1; done; echo last"
    error = live.run("exec", "--json", "--timeout", "2", "patient", "--shell", line).error
    assert error["code"] == "still_running" and "it was not stopped" in error["message"]
    with pytest.raises(StillRunning) as caught:
        workspace.commands.run(line, timeout=1)
    shell(workspace, "touch /run/go")
    exec_id = error["hint"].split("--attach ")[1].split("'")[0]
    assert live.ok("exec", "patient", "--attach", exec_id).out == b"first\nlast\n"
    assert workspace.commands.attach(caught.value.exec_id).wait().stdout == "first\nlast\n"
    shell(workspace, "rm /run/go")


def test_ctrl_c_ends_the_command_and_nothing_else(live: Live, workspace: Workspace) -> None:
    process = live.start("exec", "patient", "--shell", "echo begun; exec sleep 98765")
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    answer = interrupt(process)
    assert (answer.code, answer.complaint) == (130, "Interrupted: the command in patient was ended.\n")
    assert attempt(workspace, "pgrep -f 'sleep 9876[5]'").exit_code == 1


def test_ctrl_c_while_attached_leaves_the_command_running(live: Live, workspace: Workspace) -> None:
    handle = workspace.commands.run("echo begun; exec sleep 98766", background=True)
    assert isinstance(handle, CommandHandle)
    process = live.start("exec", "patient", "--attach", handle.exec_id)
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    answer = interrupt(process)
    assert (answer.code, answer.complaint) == (130, f"Interrupted. {handle.exec_id} in patient goes on.\n")
    shell(workspace, "pgrep -f 'sleep 9876[6]'")
    handle.kill()
    assert handle.wait().end == "killed"


def test_ctrl_c_during_an_upload_keeps_the_old_content(live: Live, workspace: Workspace) -> None:
    workspace.files.write("/root/target", "old")
    process = live.start("cp", "-", "patient:/root/target", stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(bytes(4 * MIB))  # returns when the program has read it, so most of it is on its way or there
    process.stdin.flush()
    answer = interrupt(process)
    assert answer.code == 130
    assert answer.complaint.count("\n") <= 1 and "Traceback" not in answer.complaint
    assert workspace.files.read("/root/target") == "old"


def test_two_clients_at_once(live: Live, workspace: Workspace) -> None:
    """Commands, files and checkpoints of six command lines at the same time, none of them disturbed by another."""
    begun = threading.Barrier(6)

    def work(number: int) -> bytes:
        begun.wait()
        if number == 5:
            return live.ok("checkpoint", "patient", "--json").out and b"5"
        live.ok("cp", "-", f"patient:/root/at-once-{number}", stdin=str(number).encode() * 100_000)
        return live.ok("exec", "patient", "--shell", f"sha256sum </root/at-once-{number}").out.split()[0]

    with ThreadPoolExecutor(6) as pool:
        sums = list(pool.map(work, range(6)))
    assert sums[:5] == [hashlib.sha256(str(n).encode() * 100_000).hexdigest().encode() for n in range(5)]
    shell(workspace, "rm /root/at-once-*")


# ---------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("path", ["/../etc/passwd", "/root/../../etc/passwd"])
def test_a_path_with_dots_is_refused(live: Live, workspace: Workspace, path: str, tmp_path: Path) -> None:
    for call in (workspace.files.read, workspace.files.stat, workspace.files.list, workspace.files.remove):
        with pytest.raises(PathEscape):
            call(path)
    with pytest.raises(PathEscape):
        workspace.files.write(path, b"x")
    error = live.run("cp", "--json", f"patient:{path}", str(tmp_path / "out")).error
    assert error["code"] == "path_escape"
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_the_workspace_leads_nowhere_but_in_the_workspace(workspace: Workspace) -> None:
    """The agent's own disk and the host are not below any path of the user's, whatever a link says."""
    shell(workspace, "ln -sfn /proc/1/root/../../.. /root/up; ln -sfn /../../../../opt /root/out")
    mine = shell(workspace, "hostname")
    assert workspace.files.read("/root/up/etc/hostname").strip() == mine
    assert [one.name for one in workspace.files.list("/root/out")] == shell(workspace, "ls -A /opt").split()
    shell(workspace, "rm /root/up /root/out")


def test_a_copy_out_writes_nothing_outside_of_its_destination(live: Live, workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    lines = [
        "mkdir -p /root/evil/sub",
        "echo fine >/root/evil/fine",
        f"ln -s {tmp_path}/outside /root/evil/absolute",
        "ln -s ../../outside /root/evil/relative",
        "ln -s fine /root/evil/inside",
        "mkfifo /root/evil/pipe",
        "mknod /root/evil/zero c 1 5",
        "touch \"/root/evil/$(printf 'esc\\033[31m')\"",
    ]
    shell(workspace, " && ".join(lines))
    answer = live.run("cp", "patient:/root/evil", str(tmp_path / "copy"))
    assert answer.code == 1, "what was skipped is not a success"
    assert (tmp_path / "copy" / "fine").read_text() == "fine\n"
    assert list((tmp_path / "outside").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "outside"]
    for name in ("absolute", "relative", "pipe", "zero"):
        assert f"skipped {name}:" in answer.complaint
        assert not (tmp_path / "copy" / name).exists()
    assert b"\x1b" not in answer.out + answer.err
    shell(workspace, "rm -r /root/evil")


def test_what_is_not_there_is_named(live: Live, workspace: Workspace, tmp_path: Path) -> None:
    error = live.run("cp", "--json", "patient:/root/missing", str(tmp_path / "x")).error
    assert error["code"] == "not_found" and "/root/missing" in error["message"]
    error = live.run("cp", "--json", str(tmp_path / "none"), "patient:/root/").error
    assert error["code"] == "not_found" and str(tmp_path / "none") in error["message"]
    with pytest.raises(NotFound):
        workspace.files.read("/root/missing")
    with pytest.raises(InvalidRequest):
        workspace.files.read("/root")


def test_a_large_upload_streams_through_a_server_that_does_not_grow(live: Live, workspace: Workspace) -> None:
    size = UPLOAD_MIB * MIB
    block = os.urandom(MIB)
    server = live.pid()
    before = _resident_mib(server, "VmRSS")
    Path(f"/proc/{server}/clear_refs").write_text("5")  # the peak begins anew
    told = hashlib.sha256()

    def pieces() -> Iterator[bytes]:
        for number in range(UPLOAD_MIB):
            piece = number.to_bytes(8, "big") + block[8:]
            told.update(piece)
            yield piece

    written = workspace.files.write("/root/large", pieces())
    assert (written.length, written.sha256) == (size, told.hexdigest())
    assert _resident_mib(server, "VmHWM") - before < SERVER_GROWTH_MIB
    assert shell(workspace, "sha256sum /root/large; stat -c %s /root/large").split()[::2] == [told.hexdigest(), str(size)]
    shell(workspace, "rm /root/large")


def _resident_mib(pid: int, field: str) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split(f"{field}:")[1].split()[0]) // 1024


# -------------------------------------------------------------------------------------------------------------- hosts


def test_without_qemu_the_server_says_what_to_install(home: Path) -> None:
    nothing = Live(home, {"PERDURE_QEMU": "/nonexistent/qemu-system"})
    for words in (["up", "--detach", "--json"], ["up", "--json"]):
        error = nothing.run(*words).error
        assert error["code"] == "host_unfit"
        assert "there is no /nonexistent/qemu-system" in error["message"]
        assert "apt-get install" in error["message"] + error["hint"]
    report = nothing.run("doctor", "--json")
    assert report.code == 1
    failed = {check["name"]: check for check in report.json["checks"] if check["status"] == "fail"}
    assert "apt-get install" in failed["qemu"]["hint"]
    assert not (home / "run" / "api.sock").exists()


def test_without_a_server_every_command_says_so(home: Path) -> None:
    for words in (["ls"], ["create", "x"], ["exec", "x", "--", "true"], ["cp", "x:/a", "b"], ["down"]):
        error = Live(home).run(words[0], "--json", *words[1:]).error
        assert (error["code"], error["retryable"]) == ("server_unreachable", True)
        assert "perdure up" in error["hint"]


# ------------------------------------------------------------------------------------------------------------- no space


@contextmanager
def small(path: Path) -> Iterator[None]:
    """A file system of its own, whose size can be changed under the server."""
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2g,mode=0700", "perdure-test", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def set_room(live: Live, free_bytes: int) -> None:
    store = live.home / "store"
    usage = shutil.disk_usage(store)
    subprocess.run(["mount", "-o", f"remount,size={usage.used + free_bytes}", store], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
@pytest.mark.long
def test_a_full_disk_of_the_node_loses_nothing(base_image: Path) -> None:
    """What cannot be stored is refused; what the guest writes waits; when there is room again all of it goes on."""
    with serving(store=small) as live:
        workspace = live.workspace("cramped", checkpoint_interval_s=0)
        marks = "cat /dev/shm/kept /proc/sys/kernel/random/boot_id"
        kept = shell(workspace, f"echo kept >/dev/shm/kept; {marks}")
        shell(workspace, "head -c 48M /dev/urandom >/dev/shm/noise")  # memory that a snapshot has no room for
        set_room(live, 8 * MIB)
        for command in ("checkpoint", "sleep"):
            error = live.run(command, "cramped", "--json").error
            assert (command, error["code"], error["retryable"]) == (command, "no_space", True)
            assert "nothing was lost" in error["hint"]
            assert shell(workspace, marks) == kept
        assert workspace.snapshots() == []

        writer = workspace.commands.run(
            "head -c 32M /dev/zero | tr '\\0' x >/root/large && sync && echo written", background=True
        )
        assert isinstance(writer, CommandHandle)
        until(lambda: "is full" in workspace.refresh().state_detail)
        assert workspace.info.state == "running"
        set_room(live, 1024 * MIB)
        until(lambda: workspace.refresh().state_detail == "")
        assert writer.wait(timeout=120).stdout == "written\n"
        assert shell(workspace, "stat -c %s /root/large; tr -d x </root/large | wc -c").split() == [str(32 * MIB), "0"]
        assert shell(workspace, marks) == kept
        workspace.sleep()
        assert workspace.wake().memory == "kept"
        assert shell(workspace, marks) == kept
