"""What every wire.node.Guest does, fake or real."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from perdure.core import tracing
from perdure.core.errors import AlreadyExists, Conflict, NotFound
from perdure.core.ids import ExecId
from perdure.wire.node import ExecEnd, ExecSpec, ExecStarted, FileKind
from tests.contract.guest.places import Place, collect, new_id

pytestmark = pytest.mark.asyncio(loop_scope="session")

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def content(place: Place, path: str, offset: int = 0, length: int | None = None) -> bytes:
    return b"".join([part async for part in place.guest.read_file(path, offset, length)])


@pytest_asyncio.fixture(loop_scope="session")
async def directory(place: Place) -> AsyncIterator[str]:
    path = f"/tmp/test-{os.urandom(4).hex()}"
    await place.guest.make_dir(path)
    yield path
    await place.guest.remove(path, recursive=True)


# ------------------------------------------------------------------------------------------------------------- commands


async def test_a_command_starts_speaks_and_exits_with_its_code(place: Place) -> None:
    done = await place.run(f"{place.shell('say', 'hello')}; {place.shell('warn', 'careful')}; {place.shell('exit', 3)}")
    assert isinstance(done.events[0], ExecStarted) and done.events[0].pid > 0
    assert (done.stdout, done.stderr) == (b"hello\n", b"careful\n")
    assert (done.exited.end, done.exited.exit_code, done.exited.signal) == (ExecEnd.EXITED, 3, None)


async def test_output_is_bytes_whatever_they_are(place: Place) -> None:
    done = await place.run(place.shell("bytes", "00ff80fe0a0d1b5bc3"))
    assert done.stdout == bytes.fromhex("00ff80fe0a0d1b5bc3")


async def test_large_output_arrives_whole_and_in_order(place: Place) -> None:
    done = await place.run(place.shell("spew", 700_000))
    assert done.stdout == b"x" * 700_000


async def test_stdin_reaches_the_command_and_its_end_too(place: Place) -> None:
    data = os.urandom(300_000)
    assert (await place.run(place.shell("cat"), stdin=data)).stdout == data


async def test_without_stdin_a_command_reads_nothing_and_writing_is_refused(place: Place) -> None:
    handle = await place.guest.start_exec(ExecSpec(new_id(), shell=place.shell("cat")))
    with pytest.raises(Conflict):
        await handle.write_stdin(b"x")
    assert (await collect(handle)).stdout == b""


async def test_environment_is_the_workspaces_and_the_commands(place: Place) -> None:
    assert (await place.run(place.shell("env", "COLOUR"))).stdout == b"green\n"
    assert (await place.run(place.shell("env", "COLOUR"), env={"COLOUR": "red"})).stdout == b"red\n"


async def test_a_command_finds_the_trace_of_its_caller(place: Place) -> None:
    with tracing.request(TRACEPARENT, ""):
        assert (await place.run(place.shell("env", "TRACEPARENT"))).stdout.decode() == TRACEPARENT + "\n"
        assert (await place.run(place.shell("env", "TRACEPARENT"), env={"TRACEPARENT": "own"})).stdout == b"own\n"
    assert (await place.run(place.shell("env", "TRACEPARENT"))).stdout.strip() == b""


async def test_argv_is_not_split_or_expanded(place: Place) -> None:
    handle = await place.guest.start_exec(ExecSpec(new_id(), argv=("echo", "a b", "$HOME", "*")))
    assert (await collect(handle)).stdout == b"a b $HOME *\n"


async def test_a_command_that_does_not_exist_ends_not_started_with_a_sentence(place: Place) -> None:
    handle = await place.guest.start_exec(ExecSpec(new_id(), argv=("no-such-command",)))
    done = await collect(handle)
    assert (done.exited.end, done.exited.exit_code) == (ExecEnd.NOT_STARTED, 127)
    assert "no-such-command" in done.exited.detail
    assert not any(isinstance(event, ExecStarted) for event in done.events)


async def test_a_second_start_under_one_id_is_refused_and_the_first_goes_on(place: Place) -> None:
    exec_id = new_id()
    spec = ExecSpec(exec_id, shell=place.shell("cat"), stdin=True)
    handle = await place.guest.start_exec(spec)
    with pytest.raises(AlreadyExists):
        await place.guest.start_exec(spec)
    with pytest.raises(Conflict, match="another command") as caught:
        await place.guest.start_exec(ExecSpec(exec_id, shell=place.shell("say", "twice")))
    assert not isinstance(caught.value, AlreadyExists)
    await handle.write_stdin(b"once")
    await handle.close_stdin()
    assert (await collect(handle)).stdout == b"once"
    with pytest.raises(AlreadyExists):
        await place.guest.start_exec(spec)


async def test_attaching_later_gives_what_follows_the_offsets(place: Place) -> None:
    handle = await place.guest.start_exec(
        ExecSpec(new_id(), shell=f"{place.shell('say', 'abcdef')}; {place.shell('warn', '12')}")
    )
    first = await collect(handle)
    again = await collect_from(place, handle.exec_id, 2, 3)
    assert (again[0], again[1]) == (first.stdout[2:], first.stderr[3:])
    assert again[2].end is ExecEnd.EXITED


async def collect_from(place: Place, exec_id: ExecId, stdout: int, stderr: int) -> tuple:
    handle = await place.guest.attach_exec(exec_id, stdout, stderr)
    events = [event async for event in handle.events()]
    texts = {name: b"".join(e.data for e in events if getattr(e, "stream", "") == name) for name in ("stdout", "stderr")}
    return texts["stdout"], texts["stderr"], events[-1]


async def test_detaching_leaves_the_command_running_and_killing_ends_it(place: Place) -> None:
    handle = await place.guest.start_exec(ExecSpec(new_id(), shell=place.shell("hang")))
    await handle.close()
    listed = {info.exec_id: info for info in await place.guest.list_execs()}
    assert listed[handle.exec_id].exited is None
    await place.guest.kill_exec(handle.exec_id)
    exited = (await collect(await place.guest.attach_exec(handle.exec_id))).exited
    assert (exited.end, exited.exit_code) == (ExecEnd.KILLED, 143)
    listed = {info.exec_id: info for info in await place.guest.list_execs()}
    assert listed[handle.exec_id].exited == exited


async def test_a_signal_reaches_the_command(place: Place) -> None:
    handle = await place.guest.start_exec(ExecSpec(new_id(), shell=place.shell("hang")))
    events = handle.events()
    await anext(events)
    await place.guest.signal_exec(handle.exec_id, 15)
    exited = [event async for event in events][-1]
    assert (exited.end, exited.exit_code, exited.signal) == (ExecEnd.SIGNALED, 143, 15)


@pytest.mark.parametrize(("limit", "end"), [("run_limit_s", ExecEnd.RUN_LIMIT), ("idle_limit_s", ExecEnd.IDLE_LIMIT)])
async def test_a_limit_ends_a_command_and_says_so(place: Place, limit: str, end: ExecEnd) -> None:
    done = await place.run(place.shell("hang"), **{limit: 0.4})
    assert done.exited.end is end
    assert "0.4 s" in done.exited.detail


async def test_two_clients_run_and_watch_at_once(place: Place) -> None:
    first = await place.guest.start_exec(ExecSpec(new_id(), shell=place.shell("cat"), stdin=True))
    second = await place.guest.start_exec(ExecSpec(new_id(), shell=place.shell("cat"), stdin=True))
    watcher = await place.guest.attach_exec(first.exec_id)
    for handle, text in ((second, b"two"), (first, b"one")):
        await handle.write_stdin(text)
        await handle.close_stdin()
    assert (await collect(second)).stdout == b"two"
    assert (await collect(watcher)).stdout == b"one"
    assert (await collect(first)).stdout == b"one"


async def test_unknown_commands_are_not_found(place: Place) -> None:
    for call in (place.guest.attach_exec, place.guest.kill_exec):
        with pytest.raises(NotFound):
            await call(ExecId("exe_unknown"))
    with pytest.raises(NotFound):
        await place.guest.signal_exec(ExecId("exe_unknown"), 15)


# ---------------------------------------------------------------------------------------------------------------- files


async def test_a_file_is_written_described_and_read_back(place: Place, directory: str) -> None:
    data = os.urandom(200_000)
    written = await place.guest.write_file(f"{directory}/f", chunks(data[:1], data[1:150_000], data[150_000:]), mode=0o640)
    assert (written.length, written.crc32, written.sha256) == (len(data), zlib.crc32(data), hashlib.sha256(data).hexdigest())
    info = await place.guest.stat(f"{directory}/f")
    assert (info.name, info.kind, info.size, info.mode) == ("f", FileKind.FILE, len(data), 0o640)
    assert await content(place, f"{directory}/f") == data
    assert await content(place, f"{directory}/f", 199_000) == data[199_000:]
    assert await content(place, f"{directory}/f", 10, 70_000) == data[10:70_010]
    assert await content(place, f"{directory}/f", 300_000) == b""


async def test_replacing_a_file_keeps_its_mode(place: Place, directory: str) -> None:
    await place.guest.write_file(f"{directory}/f", chunks(b"old"), mode=0o755)
    await place.guest.write_file(f"{directory}/f", chunks(b"new"))
    assert await content(place, f"{directory}/f") == b"new"
    assert (await place.guest.stat(f"{directory}/f")).mode == 0o755


async def test_an_upload_that_breaks_off_leaves_the_old_content_and_nothing_else(place: Place, directory: str) -> None:
    await place.guest.write_file(f"{directory}/f", chunks(b"old"))

    async def broken() -> AsyncIterator[bytes]:
        yield b"half of the new"
        raise RuntimeError("the client went away")

    with pytest.raises(RuntimeError):
        await place.guest.write_file(f"{directory}/f", broken())
    assert await content(place, f"{directory}/f") == b"old"
    assert [info.name for info in await place.guest.list_dir(directory)] == ["f"]


async def test_directories_are_made_listed_renamed_and_removed(place: Place, directory: str) -> None:
    await place.guest.make_dir(f"{directory}/a/b", mode=0o700)
    await place.guest.make_dir(f"{directory}/a/b")  # once more is no error
    await place.guest.write_file(f"{directory}/a/f", chunks())
    assert [(info.name, info.kind) for info in await place.guest.list_dir(f"{directory}/a")] == [
        ("b", FileKind.DIRECTORY),
        ("f", FileKind.FILE),
    ]
    await place.guest.rename(f"{directory}/a/f", f"{directory}/g")
    with pytest.raises(NotFound):
        await place.guest.stat(f"{directory}/a/f")
    with pytest.raises(Conflict):
        await place.guest.remove(f"{directory}/a")
    await place.guest.remove(f"{directory}/a", recursive=True)
    assert [info.name for info in await place.guest.list_dir(directory)] == ["g"]


async def test_what_is_not_there_is_not_found(place: Place) -> None:
    with pytest.raises(NotFound):
        await place.guest.stat("/tmp/none")
    with pytest.raises(NotFound):
        await place.guest.list_dir("/tmp/none")
    with pytest.raises(NotFound):
        await content(place, "/tmp/none")
    with pytest.raises(NotFound):
        await place.guest.write_file("/tmp/none/f", chunks(b"x"))
    with pytest.raises(NotFound):
        await place.guest.remove("/tmp/none")
    with pytest.raises(NotFound):
        await place.guest.rename("/tmp/none", "/tmp/other")


async def test_making_what_exists_without_parents_is_refused(place: Place, directory: str) -> None:
    with pytest.raises(AlreadyExists):
        await place.guest.make_dir(directory, parents=False)


# ---------------------------------------------------------------------------------------------------------------- ports


async def test_a_port_where_nothing_listens_is_not_found(place: Place) -> None:
    with pytest.raises(NotFound, match="port 9"):
        await place.guest.open_tcp(9)


# ------------------------------------------------------------------------------------------------------------- counting


async def test_what_callers_bring_and_get_is_counted(place: Place, directory: str) -> None:
    path, upload = f"{directory}/file", f"upl_{os.urandom(8).hex()}"
    inward, outward = place.moved
    await place.guest.write_file(path, chunks(b"a" * 100_000, b"b" * 500))
    assert place.moved == (inward + 100_500, outward)
    assert len(await content(place, path, 500)) == 100_000
    assert place.moved == (inward + 100_500, outward + 100_000)
    await place.guest.begin_upload(upload)
    await place.guest.append_upload(upload, 0, chunks(b"c" * 300))
    await place.guest.drop_upload(upload)
    assert place.moved == (inward + 100_800, outward + 100_000)
    assert (await place.run(place.shell("cat"), stdin=b"d" * 200)).stdout == b"d" * 200
    assert place.moved == (inward + 101_000, outward + 100_200)
    await place.guest.ping()
    await place.guest.ping_program(1.0)
    assert place.moved == (inward + 101_000, outward + 100_200), "what the server asks for itself is nobody's request"


async def test_a_guest_answers_a_ping(place: Place) -> None:
    assert await place.guest.ping() > 0
