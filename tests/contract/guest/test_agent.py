"""What only a guest with the real agent can show: processes, accounts, links, full disks, ports, the way out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from perdure.core.errors import Conflict, Forbidden, InvalidRequest, MachineFailed, NoSpace, NotFound, PathEscape
from perdure.machines.guestlink_stream import LinkStream
from perdure.wire.node import ExecEnd, ExecOutput, ExecSpec, ExecStarted, FileKind
from tests.contract.guest.places import DEADLINE_S, Place, collect, new_id

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def content(place: Place, path: str) -> bytes:
    return b"".join([part async for part in place.guest.read_file(path)])


@pytest_asyncio.fixture(loop_scope="session")
async def directory(real: Place) -> AsyncIterator[str]:
    path = f"/root/test-{os.urandom(4).hex()}"
    await real.guest.make_dir(path)
    yield path
    await real.guest.remove(path, recursive=True)


# ------------------------------------------------------------------------------------------------------------- commands


async def test_users_processes_live_in_a_namespace_of_their_own(real: Place) -> None:
    done = await real.run("echo $$; cat /proc/1/comm; cat /proc/self/oom_score_adj; ls /proc | grep -c '^[0-9]'")
    pid, init, oom, count = done.stdout.decode().split()
    started = done.events[0]
    assert isinstance(started, ExecStarted) and started.pid == int(pid)
    assert (init, oom) == ("perdure-init", "0")
    assert int(count) < 40, "the agent's own world must not be seen"


@pytest.mark.parametrize("user", ["nobody", "65534", "1234:1235"])
async def test_a_command_runs_as_the_user_asked_for(real: Place, user: str) -> None:
    done = await real.run("id -u; id -g; echo $HOME; touch /etc/owned 2>&1 || true", user=user)
    uid, gid, home, *refused = done.stdout.decode().split("\n")
    expected = {"nobody": ("65534", "65534"), "65534": ("65534", "65534"), "1234:1235": ("1234", "1235")}[user]
    assert (uid, gid) == expected and home.startswith("/")
    assert "denied" in refused[0] or "Read-only" in refused[0]


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"argv": ("/etc/passwd",)}, 126, "cannot be executed"),
        ({"argv": ("/none",)}, 127, "no command '/none'"),
        ({"argv": ("ls",), "cwd": "/none"}, 126, "'/none' cannot be entered"),
        ({"argv": ("ls",), "user": "eve"}, 126, "no user 'eve'"),
    ],
)
async def test_what_cannot_start_says_why_in_a_sentence(real: Place, fields: dict[str, Any], code: int, words: str) -> None:
    done = await collect(await real.guest.start_exec(ExecSpec(new_id(), **fields)))
    assert (done.exited.end, done.exited.exit_code) == (ExecEnd.NOT_STARTED, code)
    assert words in done.exited.detail and done.exited.detail.endswith(".")


async def test_a_script_without_an_interpreter_line_runs_as_in_a_shell(real: Place, directory: str) -> None:
    for number in range(10):  # at once after the upload, which must not still hold the file open
        await real.guest.write_file(f"{directory}/script", chunks(f"echo ran {number} $1\n".encode()), mode=0o755)
        done = await collect(await real.guest.start_exec(ExecSpec(new_id(), argv=("./script", "x"), cwd=directory)))
        assert (done.stdout.decode(), done.exited.detail) == (f"ran {number} x\n", "")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"argv": ()},
        {"argv": ("ls",), "shell": "ls"},
        {"argv": ("a\0b",)},
        {"shell": "ls", "env": {"A=B": "c"}},
        {"shell": "ls", "env": {"": "c"}},
        {"shell": "ls", "run_limit_s": 0.0},
        {"shell": "x" * 70_000},
    ],
    ids=["nothing", "no words", "both", "nul", "equals", "nameless", "limit", "too long"],
)
async def test_bad_commands_are_refused_before_they_are_sent(real: Place, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        await real.guest.start_exec(ExecSpec(new_id(), **fields))


async def test_a_command_has_ended_when_it_has_though_background_children_hold_its_output(real: Place) -> None:
    done = await asyncio.wait_for(real.run("(sleep 1000; echo late) & echo $!; echo now"), DEADLINE_S)
    pid, now = done.stdout.decode().split()
    assert now == "now" and done.exited.exit_code == 0
    assert (await real.run(f"kill {pid}")).exited.exit_code == 0, "the child goes on"


async def test_a_background_child_that_writes_later_does_not_die_of_a_closed_pipe(real: Place, directory: str) -> None:
    await real.run(f"mkfifo {directory}/go; (read x <{directory}/go; echo late; echo later; echo survived >{directory}/said) &")
    await real.run(f"echo >{directory}/go", run_limit_s=DEADLINE_S)
    await real.run(f"until [ -s {directory}/said ]; do sleep 0.1; done", run_limit_s=DEADLINE_S)
    assert await content(real, f"{directory}/said") == b"survived\n"


async def test_a_freeze_and_a_thaw_are_no_work_of_the_users_and_what_they_left_running_is(real: Place) -> None:
    """A node tells by this whether a workspace has changed since it was captured."""
    await real.run("kill -9 -1")
    await real.run("true")  # at its end what is left of the killed is put away
    before = await real.link.cpu_s()
    for _ in range(20):
        await real.link.quiesce(deadline_s=DEADLINE_S)
        await real.link.thaw()
    assert await real.link.cpu_s() == before
    await real.run("(sleep 0.2; while :; do echo >/dev/null; done) >/dev/null 2>&1 &")
    before = await real.link.cpu_s()
    async with asyncio.timeout(DEADLINE_S):
        while await real.link.cpu_s() == before:
            pass
    await real.run("kill -9 -1")


async def test_a_limit_kills_everything_that_the_command_started(real: Place) -> None:
    tag = f"10{os.urandom(3).hex()}".translate(str.maketrans("abcdef", "123456"))
    shell = f"trap '' TERM; (setsid sh -c \"trap '' TERM; while :; do sleep {tag}; done\" &) ; while :; do sleep 1; done"
    for limit_s in (0.5, 2.0, 8.0):  # a shell that is slow to begin ignores nothing yet, and ends at the first signal
        done = await real.run(shell, run_limit_s=limit_s, kill_grace_s=0.3)
        if done.exited.signal == 9:
            break
    assert (done.exited.end, done.exited.signal) == (ExecEnd.RUN_LIMIT, 9)
    gone = await real.run(f"while ps -eo args | grep -q '^sleep {tag}$'; do sleep 0.1; done", run_limit_s=DEADLINE_S)
    assert gone.exited.end is ExecEnd.EXITED


@pytest.mark.long_on("vm")
async def test_output_resets_the_idle_limit(real: Place) -> None:
    done = await real.run("for i in 1 2 3 4 5 6; do echo $i; sleep 0.5; done", idle_limit_s=2.5)
    assert done.exited.end is ExecEnd.EXITED


async def test_without_a_reader_a_command_is_not_blocked_and_the_loss_is_named(real: Place) -> None:
    exec_id, size = new_id(), 3_000_000
    handle = await real.guest.start_exec(ExecSpec(exec_id, shell=f"read x; head -c {size} /dev/zero; echo end", stdin=True))
    await handle.write_stdin(b"\n")
    await handle.close()
    watcher = await real.guest.attach_exec(exec_id, size)  # ahead of what is there: it only waits for the end
    last = [event async for event in watcher.events()]
    assert last[-1].end is ExecEnd.EXITED
    done = await collect(await real.guest.attach_exec(exec_id))
    outputs = [event for event in done.events if isinstance(event, ExecOutput)]
    assert outputs[0].gap > 0 and outputs[-1].offset + len(outputs[-1].data) == size + 4
    assert done.stdout.endswith(b"end\n")


async def test_a_slow_reader_loses_nothing(real: Place) -> None:
    size = 4_000_000
    handle = await real.guest.start_exec(ExecSpec(new_id(), shell=f"head -c {size} /dev/zero"))
    received = 0
    async for event in handle.events():
        if isinstance(event, ExecOutput):
            assert event.gap == 0
            received += len(event.data)
            await real.guest.ping()  # takes its time, and is not held up by what waits
    assert received == size


async def test_a_command_that_ignores_its_input_does_not_hold_anybody_up(real: Place) -> None:
    handle = await real.guest.start_exec(ExecSpec(new_id(), shell="exec sleep 1000", stdin=True))
    writing = asyncio.create_task(handle.write_stdin(bytes(2_000_000)))
    assert (await real.run("echo quick")).stdout == b"quick\n"
    assert not writing.done()
    await real.guest.kill_exec(handle.exec_id)
    await writing
    await collect(handle)


# ---------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("path", ["/../etc/passwd", "/tmp/../../etc/passwd", "/tmp/a/../../../x"])
async def test_a_path_that_climbs_above_the_root_is_refused(real: Place, path: str) -> None:
    with pytest.raises(PathEscape, match="leads out of"):
        await real.guest.stat(path)


@pytest.mark.parametrize("path", ["etc/passwd", "", "/a\0b", "/" + "x" * 5000])
async def test_a_path_that_is_none_is_refused(real: Place, path: str) -> None:
    with pytest.raises(InvalidRequest):
        await real.guest.write_file(path, chunks(b""))


async def test_links_lead_nowhere_but_inside_the_root(real: Place, directory: str) -> None:
    await real.run(f"ln -s / {directory}/up; ln -s /../../../../root {directory}/out; ln -s /etc/hostname {directory}/name")
    outside = await real.guest.stat("/opt") if real.kind == "vm" else None
    assert outside is None or outside.kind is FileKind.DIRECTORY
    with pytest.raises(NotFound):
        await content(real, f"{directory}/up/opt/perdure/perdure/guest/start.py")
    assert [info.name for info in await real.guest.list_dir(f"{directory}/out")] == [
        info.name for info in await real.guest.list_dir("/root")
    ]
    assert await content(real, f"{directory}/name") == await content(real, "/etc/hostname")


async def test_writing_through_a_link_replaces_its_target(real: Place, directory: str) -> None:
    await real.guest.write_file(f"{directory}/target", chunks(b"old"))
    await real.run(f"ln -s target {directory}/link")
    await real.guest.write_file(f"{directory}/link", chunks(b"new"))
    assert (await real.guest.stat(f"{directory}/link")).target == "target"
    assert await content(real, f"{directory}/target") == b"new"


async def test_names_are_bytes(real: Place, directory: str) -> None:
    await real.run(f"cd {directory}; touch \"$(printf 'a\\377b')\"")
    (info,) = await real.guest.list_dir(directory)
    assert os.fsencode(info.name) == b"a\xffb"
    assert (await real.guest.stat(info.path)).name == info.name


async def test_files_of_proc_that_claim_to_be_empty_are_read_whole(real: Place) -> None:
    assert (await real.guest.stat("/proc/1/status")).size == 0
    assert b"perdure-init" in await content(real, "/proc/1/status")


@pytest.mark.parametrize("make", ["mkfifo {}/x", "mkdir {}/x", "ln -s /dev/null {}/x", "ln -s x {}/x"])
async def test_what_is_no_regular_file_is_neither_read_nor_replaced(real: Place, directory: str, make: str) -> None:
    await real.run(make.format(directory))
    before = await real.guest.stat(f"{directory}/x")
    with pytest.raises(InvalidRequest):
        await content(real, f"{directory}/x")
    with pytest.raises(InvalidRequest):
        await real.guest.write_file(f"{directory}/x", chunks(b"data"))
    assert await real.guest.stat(f"{directory}/x") == before


async def test_what_the_kernel_forbids_is_forbidden(real: Place) -> None:
    with pytest.raises((Forbidden, NotFound, MachineFailed)):
        await real.guest.write_file("/proc/version", chunks(b"x"))
    with pytest.raises(InvalidRequest):
        await real.guest.remove("/", recursive=True)


async def test_a_tree_is_removed_without_following_links(real: Place, directory: str) -> None:
    await real.run(f"cd {directory}; mkdir -p kept t/a/b/c; touch kept/f t/f t/a/b/c/f; ln -s ../../kept t/a/link")
    with pytest.raises(Conflict, match="not empty"):
        await real.guest.remove(f"{directory}/t")
    await real.guest.remove(f"{directory}/t", recursive=True)
    assert [info.name for info in await real.guest.list_dir(directory)] == ["kept"]
    assert (await real.guest.stat(f"{directory}/kept/f")).kind is FileKind.FILE


async def test_a_large_upload_is_streamed_and_holds_up_neither_ping_nor_command(real: Place) -> None:
    """64 MiB; the source is never more than one window ahead of what the guest took."""
    block, count, taken = os.urandom(65536), 1024, 0
    progress = asyncio.Event()

    async def source() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(count):
            taken += 1
            if taken == 100:
                progress.set()
            yield block

    path = "/dev/shm/large" if real.kind == "vm" else "/tmp/large"
    writing = asyncio.create_task(real.guest.write_file(path, source()))
    await progress.wait()
    await real.guest.ping()
    assert (await real.run("echo quick")).stdout == b"quick\n"
    assert not writing.done() and taken < count, "the ping and the command were answered in the middle of the upload"
    written = await writing
    assert written.length == count * 65536
    assert (await real.guest.stat(path)).size == count * 65536
    await real.guest.remove(path)


async def test_a_reader_that_stops_early_leaves_the_next_operations_alone(real: Place, directory: str) -> None:
    data = os.urandom(3_000_000)
    for _ in range(5):
        await real.guest.write_file(f"{directory}/f", chunks(data))
        reading = real.guest.read_file(f"{directory}/f")
        assert data.startswith(await anext(reading))
        await reading.aclose()
        assert await content(real, f"{directory}/f") == data


@pytest.mark.long_on("vm")
async def test_commands_start_while_files_are_moved(real: Place, directory: str) -> None:
    """Files are a thread's work; what is forked meanwhile must not wait for it."""
    data = os.urandom(2_000_000)
    moving = True

    async def move() -> None:
        while moving:
            await real.guest.write_file(f"{directory}/f", chunks(data))
            assert await content(real, f"{directory}/f") == data

    movers = [asyncio.create_task(move()) for _ in range(3)]
    for number in range(20):
        assert (await real.run(f"echo {number}", user="nobody")).stdout == f"{number}\n".encode()
    moving = False
    await asyncio.gather(*movers)


async def test_a_full_disk_is_said_plainly_and_commands_go_on(real: Place) -> None:
    limit = 40 << 20
    await real.run(f"mkdir -p /tmp/small && mount -t tmpfs -o size={limit} tmpfs /tmp/small && echo old >/tmp/small/f")

    async def source() -> AsyncIterator[bytes]:
        for _ in range(2 * limit // 65536):
            yield bytes(65536)

    with pytest.raises(NoSpace, match="no space left"):
        await real.guest.write_file("/tmp/small/f", source())
    assert await content(real, "/tmp/small/f") == b"old\n"
    assert (await real.run("umount /tmp/small && echo fine")).stdout == b"fine\n"


# ---------------------------------------------------------------------------------------------------------------- ports

_SERVER = """
import socket
server = socket.create_server(("{host}", 0), family=socket.{family})
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
data = b""
while chunk := connection.recv(65536):
    data += chunk
connection.sendall(data[::-1])
"""


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", "AF_INET"), ("::1", "AF_INET6")])
async def test_a_tunnel_carries_both_directions_and_half_closes(real: Place, host: str, family: str) -> None:
    argv = ("python3", "-c", _SERVER.format(host=host, family=family))
    handle = await real.guest.start_exec(ExecSpec(new_id(), argv=argv))
    events = handle.events()
    port = b""
    while not port.endswith(b"\n"):
        event = await anext(events)
        port += event.data if isinstance(event, ExecOutput) else b""
    inward, outward = real.moved
    stream = await real.guest.open_tcp(int(port))
    data = os.urandom(600_000)
    await stream.write(data)
    await stream.close_write()
    received = b""
    while chunk := await stream.read(50_000):
        assert len(chunk) <= 50_000
        received += chunk
    assert received == data[::-1]
    assert real.moved == (inward + 600_000, outward + 600_000)
    await stream.close()
    async for _ in events:
        pass


@pytest.mark.parametrize("port", [0, -1, 65536])
async def test_a_number_that_is_no_port_is_refused(real: Place, port: int) -> None:
    with pytest.raises(InvalidRequest, match="port number"):
        await real.guest.open_tcp(port)


# ----------------------------------------------------------------------------------------------------------- the way out

_ASK = """
import socket, sys
s = socket.create_connection(("127.0.0.1", {port}))
s.sendall({request!r})
out = b""
try:
    while chunk := s.recv(65536):
        out += chunk
except ConnectionResetError:
    out += b"[reset]"
sys.stdout.buffer.write(out)
"""


async def ask(real: Place, port: int, request: bytes) -> bytes:
    handle = await real.guest.start_exec(ExecSpec(new_id(), argv=("python3", "-c", _ASK.format(port=port, request=request))))
    return (await collect(handle)).stdout


def answering(reply: bytes, heard: list[bytes]) -> Any:
    """Accepts a stream, reads one request's worth, answers, closes."""
    tasks = set()

    def on_stream(_what: str, _info: dict[str, Any], stream: LinkStream) -> None:
        async def serve() -> None:
            await stream.accept()
            heard.append(await stream.read())
            await stream.write(reply)
            await stream.close_write()
            while await stream.read():
                pass

        tasks.add(asyncio.create_task(serve()))

    return on_stream


def refusing(status: int, reason: str) -> Any:
    tasks = set()

    def on_stream(_what: str, _info: dict[str, Any], stream: LinkStream) -> None:
        tasks.add(asyncio.create_task(stream.refuse(status, reason)))

    return on_stream


async def test_programs_reach_the_control_plane_through_the_api_port(real: Place) -> None:
    heard: list[bytes] = []
    real.on_stream = answering(b"HTTP/1.1 204 No Content\r\n\r\n", heard)
    assert await ask(real, 7071, b"GET /me HTTP/1.1\r\n\r\n") == b"HTTP/1.1 204 No Content\r\n\r\n"
    assert heard == [b"GET /me HTTP/1.1\r\n\r\n"]
    assert [(what, info) for what, info, _ in real.streams] == [("api", {})]


async def test_connect_asks_the_node_and_then_carries_bytes(real: Place) -> None:
    heard: list[bytes] = []
    real.on_stream = answering(b"pong", heard)
    inward, _ = real.moved
    assert await ask(real, 7072, b"CONNECT h.example:443 HTTP/1.1\r\n\r\nping") == (
        b"HTTP/1.1 200 Connection established\r\n\r\npong"
    )
    assert heard == [b"ping"]
    assert real.streams[0][:2] == ("egress", {"host": "h.example", "port": 443})
    assert real.moved[0] == inward, "what its own connections bring is no request's"


async def test_plain_http_is_forwarded_in_origin_form(real: Place) -> None:
    heard: list[bytes] = []
    real.on_stream = answering(b"HTTP/1.0 200 OK\r\n\r\nbody", heard)
    assert await ask(real, 7072, b"GET http://h.example/x HTTP/1.1\r\nHost: h.example\r\n\r\n") == b"HTTP/1.0 200 OK\r\n\r\nbody"
    assert heard == [b"GET /x HTTP/1.1\r\nHost: h.example\r\nConnection: close\r\n\r\n"]
    assert real.streams[0][:2] == ("egress", {"host": "h.example", "port": 80})


@pytest.mark.parametrize(("status", "line"), [(403, b"403 Forbidden"), (502, b"502 Bad Gateway"), (504, b"502 Bad Gateway")])
async def test_a_refusal_reaches_the_program_as_http_with_its_sentence(real: Place, status: int, line: bytes) -> None:
    real.on_stream = refusing(status, "h.example:443 is not on this workspace's allow list.")
    reply = await ask(real, 7072, b"CONNECT h.example:443 HTTP/1.1\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 " + line + b": ")
    assert reply.endswith(b"\r\n\r\nh.example:443 is not on this workspace's allow list.\n")


async def test_what_is_not_for_a_proxy_gets_a_400(real: Place) -> None:
    assert (await ask(real, 7072, b"GET / HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
    assert not real.streams


async def test_user_programs_are_told_of_the_proxy(real: Place) -> None:
    done = await real.run("echo $http_proxy $HTTPS_PROXY; echo $no_proxy")
    assert done.stdout == b"http://127.0.0.1:7072 http://127.0.0.1:7072\nlocalhost,127.0.0.1,::1\n"


async def test_what_is_open_is_counted(real: Place) -> None:
    handle = await real.guest.start_exec(ExecSpec(new_id(), shell="exec sleep 1000"))
    activity = real.link.activity()
    assert (activity.open_execs, activity.idle_for_s) == (1, 0.0) and activity.running_execs >= 1
    await handle.close()
    assert real.link.activity().open_execs == 0
    running = real.link.activity().running_execs
    await real.guest.kill_exec(handle.exec_id)
    await collect(await real.guest.attach_exec(handle.exec_id))
    await real.guest.ping()
    assert real.link.activity().running_execs == running - 1
    assert real.link.activity().open_streams == 0
