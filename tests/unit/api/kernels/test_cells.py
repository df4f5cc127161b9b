"""Cells and kernels, over the fake and over a real ipykernel as a process of this host."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from perdure.core.errors import CellStuck, Conflict, InvalidRequest, KernelDied, PythonFailed, PythonMissing
from perdure.wire import node
from tests.unit.api.kernels.conftest import Pythons, Said, fake, host, keepers, new_id

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def own() -> AsyncIterator[Pythons]:
    """A real kernel that a test may end, and that is soon said to be stuck."""
    async for made in host(patience_s=0.5):
        yield made


async def test_variables_stay_and_the_last_expression_is_the_result(pythons: Pythons) -> None:
    first = await pythons.run("x = 40\nprint('hello')")
    assert (first.stdout, first.done.status, first.shown) == ("hello\n", "ok", [])
    second = await pythons.run("x + 2")
    assert (second.value, second.done.status) == ("42", "ok")
    assert second.done.execution_count == (first.done.execution_count or 0) + 1
    assert second.started.kernel == first.started.kernel and not second.started.restarted


@pytest.mark.parametrize(
    ("code", "name"),
    [("1 / 0", "ZeroDivisionError"), ("def f(:", "SyntaxError"), ("import nothing_of_that_name", "ModuleNotFoundError")],
)
async def test_what_fails_is_told_and_the_kernel_goes_on(pythons: Pythons, code: str, name: str) -> None:
    said = await pythons.run(code)
    assert (said.done.status, said.error.name) == ("error", name)
    assert name in said.error.traceback and "\x1b" not in said.error.traceback
    assert (await pythons.run("'still here'")).value == "'still here'"


async def test_both_streams_are_told_apart(pythons: Pythons) -> None:
    said = await pythons.run("import sys\nprint('out')\nprint('err', file=sys.stderr)")
    assert (said.stdout, said.stderr) == ("out\n", "err\n")


async def test_contexts_are_kernels_of_their_own(pythons: Pythons) -> None:
    await pythons.run("y = 'mine'")
    other = await pythons.run("'y' in globals()", context="other")
    assert other.value == "False"
    assert (await pythons.run("y")).value == "'mine'"


async def test_a_cell_that_had_its_time_is_interrupted_and_its_kernel_lives(pythons: Pythons) -> None:
    """(peers: row 26)"""
    await pythons.run("import asyncio\nz = 7")
    said = await pythons.run("print('before')\nawait asyncio.sleep(1000)", timeout_s=0.3)
    assert said.done.status == "timeout" and said.stdout == "before\n"
    assert said.error.name in {"KeyboardInterrupt", "CancelledError"}
    assert (await pythons.run("z")).value == "7"


async def test_an_interrupt_ends_what_runs_and_what_waits_comes_next(pythons: Pythons) -> None:
    await pythons.run("import asyncio")
    assert await pythons.kernels.interrupt("default") is False
    running = await pythons.begin("print('on')\nawait asyncio.sleep(1000)")
    follower = asyncio.create_task(until(pythons, running, "stream"))
    await follower
    waiting = asyncio.create_task(pythons.run("'next'"))
    assert await pythons.kernels.interrupt("default") is True
    said = await waiting
    assert said.value == "'next'"
    again = await pythons.follow(await pythons.kernels.guest.attach_exec(running.exec_id))
    assert again.done.status == "interrupted"


async def until(pythons: Pythons, handle: node.ExecHandle, kind: str) -> None:
    events = pythons.kernels.events(handle, "default")
    async for event in events:
        if event.type == kind:
            break
    await events.aclose()


async def test_callers_at_once_take_their_turns(pythons: Pythons) -> None:
    await pythons.run("seen = []")
    said = await asyncio.gather(*(pythons.run(f"seen.append({number})\nlen(seen)") for number in range(4)))
    assert sorted(int(one.value) for one in said) == [1, 2, 3, 4]
    assert [one.events[0].type for one in said].count("queued") <= 3


async def test_a_cell_that_is_sent_again_is_attached_to(pythons: Pythons) -> None:
    await pythons.run("count = 0")
    exec_id, code = new_id(), "count += 1\ncount"
    first = await pythons.follow(await pythons.begin(code, exec_id=exec_id))
    second = await pythons.follow(await pythons.begin(code, exec_id=exec_id))
    assert (first.value, second.value) == ("1", "1") and first.events == second.events
    with pytest.raises(Conflict):
        await pythons.begin("count += 2", exec_id=exec_id)
    with pytest.raises(Conflict):
        await pythons.begin(code, exec_id=exec_id, context="other")


async def test_who_comes_back_goes_on_where_he_was(pythons: Pythons) -> None:
    handle = await pythons.begin("print('one')\nprint('two')\n3")
    said = await pythons.follow(handle)
    for place, event in enumerate(said.events[:-1]):
        again = await pythons.kernels.guest.attach_exec(handle.exec_id, event.offset)
        assert (await pythons.follow(again, offset=event.offset)).events == said.events[place + 1 :]


async def test_whoever_leaves_while_a_kernel_starts_finds_his_cell_done(own: Pythons) -> None:
    handle = await own.begin("print('done')")
    said = own.kernels.events(handle, "default")
    first = asyncio.ensure_future(anext(said))
    while not (own.directory / "run/default/lock").exists():  # noqa: ASYNC110 - what starts the kernel tells nobody
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await said.aclose()
    again = await own.follow(await own.kernels.guest.attach_exec(handle.exec_id))
    assert again.stdout == "done\n" and again.started.kernel == 1


async def test_who_reads_a_cell_later_starts_no_kernel_for_it(pythons: Pythons) -> None:
    handle = await pythons.begin("1", context="later")
    first = await pythons.follow(handle, "later")
    await pythons.kernels.restart("later")
    again = await pythons.follow(await pythons.kernels.guest.attach_exec(handle.exec_id), "later")
    assert again.events == first.events
    assert (await pythons.run("1", context="later")).started.kernel == 2


async def test_a_kernel_that_is_started_anew_says_so_once(pythons: Pythons) -> None:
    before = await pythons.run("kept = 1")
    made = await pythons.kernels.restart("default")
    assert made.restarted and made.reason == "It was restarted on request." and made.kernel == before.started.kernel + 1
    said = await pythons.run("'kept' in globals()")
    assert said.value == "False" and said.started.restarted and said.started.reason == made.reason
    assert not (await pythons.run("1")).started.restarted


async def test_a_restart_ends_what_runs(pythons: Pythons) -> None:
    await pythons.run("import asyncio")
    running = await pythons.begin("print('on')\nawait asyncio.sleep(1000)")
    await until(pythons, running, "stream")
    await pythons.kernels.restart("default")
    with pytest.raises(KernelDied, match="restarted on request") as caught:
        await pythons.follow(await pythons.kernels.guest.attach_exec(running.exec_id))
    assert caught.value.ambiguous


async def test_what_is_no_cell_cannot_be_followed_as_one() -> None:
    pythons = fake()
    handle = await pythons.guest.start_exec(node.ExecSpec(new_id(), shell="echo hello"))
    with pytest.raises(InvalidRequest, match="not a Python cell"):
        await pythons.follow(handle)


async def test_without_python_or_ipykernel_it_says_what_to_do() -> None:
    pythons = fake()
    pythons.guest.world.python.has_ipykernel = False
    with pytest.raises(PythonMissing, match="no ipykernel") as caught:
        await pythons.run("1")
    assert "python-data" in caught.value.hint and "install ipykernel" in caught.value.hint
    pythons.guest.world.python.exists = False
    with pytest.raises(PythonMissing, match="no command 'python3'"):
        await pythons.run("1")
    async with asyncio.timeout(30):  # none waits for a kernel that never comes
        await asyncio.gather(*(command.task for command in pythons.guest.world.commands.values()))


# ------------------------------------------------------------------------------------------------------- real kernels alone


async def test_pictures_and_other_results_come_as_the_kernel_gives_them(real: Pythons) -> None:
    code = """
from IPython.display import HTML, JSON, Image, display
display(HTML("<b>bold</b>"))
display(JSON({"a": [1, None, 2.5]}))
display(Image(data=b"\\x89PNG\\r\\n\\x1a\\n", format="png"))
display({"application/x-unheard-of": {"deep": ["er"]}}, raw=True)
"""
    said = await real.run(code)
    html, json, png, odd = said.shown
    assert html["text/html"] == "<b>bold</b>"
    assert json["application/json"] == {"a": [1, None, 2.5]}
    assert base64.b64decode(png["image/png"]).startswith(b"\x89PNG")
    assert odd == {"application/x-unheard-of": {"deep": ["er"]}}


async def test_what_is_shown_again_names_what_it_replaces(real: Pythons) -> None:
    said = await real.run("from IPython.display import display\nh = display('a', display_id=True)\nh.update('b')")
    shown = [event for event in said.events if event.data]
    assert [event.type for event in shown] == ["display_data", "update_display_data"]
    assert shown[0].display_id and shown[0].display_id == shown[1].display_id


async def test_input_is_refused_in_words(real: Pythons) -> None:
    said = await real.run("input('name? ')")
    assert said.error.name == "StdinNotImplementedError" and "does not support input" in said.error.value


async def test_bytes_that_are_no_text_do_no_harm(real: Pythons) -> None:
    said = await real.run(r"import os; os.write(1, b'\xff\xfe'); print('\udc80')")
    assert said.done.status == "ok"
    said.stdout.encode()
    assert (await real.run("'fine'")).value == "'fine'"


async def test_a_flood_is_cut_and_said_to_be(real: Pythons) -> None:
    said = await real.run("for _ in range(12):\n    print('x' * (1 << 20))\nprint('end')")
    assert said.done.truncated and said.done.status == "ok" and len(said.stdout) == 8 << 20
    assert not (await real.run("1")).done.truncated


async def test_a_picture_that_is_too_large_is_left_out_by_name(real: Pythons) -> None:
    code = "from IPython.display import display\n"
    code += "display({'text/plain': 'small', 'image/png': 'A' * (33 << 20)}, raw=True)"
    said = await real.run(code)
    event = next(event for event in said.events if event.type == "display_data")
    assert (event.data, event.omitted, said.done.truncated) == ({"text/plain": "small"}, ["image/png"], True)


async def test_a_large_picture_comes_whole(real: Pythons) -> None:
    code = "from IPython.display import display\ndisplay({'image/png': 'QUJD' * (2 << 20)}, raw=True)"
    assert (await real.run(code)).shown == [{"image/png": "QUJD" * (2 << 20)}]


async def test_it_has_what_an_interactive_python_has(real: Pythons) -> None:
    said = await real.run("import os, sys\n(sys.argv, sys.path[0], __name__, os.environ['MPLBACKEND'])")
    assert said.value == "([''], '', '__main__', 'module://matplotlib_inline.backend_inline')"


async def test_what_a_cell_runs_in_the_foreground_is_interrupted_too(real: Pythons) -> None:
    said = await real.run("import subprocess\nsubprocess.run(['sleep', '1000'])", timeout_s=0.3)
    assert said.done.status == "timeout"


async def test_one_that_ignores_interrupts_is_told_to_be_stuck(own: Pythons) -> None:
    code = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(1000)"
    with pytest.raises(CellStuck, match="does not stop"):
        await own.run(code, timeout_s=0.2)
    other = asyncio.create_task(own.run("'next'"))
    await asyncio.sleep(0)
    made = await own.kernels.restart("default")
    assert made.restarted
    assert (await other).value == "'next'"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os\nprint('on', flush=True)\nos._exit(3)", "exited with code 3"),
        ("import os\nos.kill(os.getpid(), 9)", "killed by signal 9"),
        ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nimport time\ntime.sleep(1000)", "watched over the kernel"),
    ],
)
async def test_a_kernel_that_dies_is_told_and_the_next_cell_gets_another(own: Pythons, code: str, why: str) -> None:
    await own.run("lost = 1")
    with pytest.raises(KernelDied, match=why) as caught:
        await own.run(code)
    assert caught.value.ambiguous and not caught.value.retryable
    said = await own.run("'lost' in globals()")
    assert said.value == "False" and said.started.restarted and said.started.reason


async def test_whoever_leaves_with_exit_ends_his_kernel(own: Pythons) -> None:
    await own.run("import os\npid = os.getpid()")
    said = await own.run("exit()")
    assert said.done.status == "ok"
    await own.kernels.restart("default")
    assert (await own.run("'pid' in globals()")).value == "False"


async def test_a_killed_cell_is_interrupted_and_its_kernel_lives(own: Pythons) -> None:
    """What the workspace's 'kill' does to a cell's command."""
    await own.run("kept = 1\nimport time")
    running = await own.begin("print('on')\ntime.sleep(1000)")
    await until(own, running, "stream")
    await own.guest.kill_exec(running.exec_id)
    with pytest.raises(PythonFailed):
        await own.follow(await own.kernels.guest.attach_exec(running.exec_id))
    assert (await own.run("kept")).value == "1"


async def test_a_kernel_remembers_what_was_before_a_boot(own: Pythons) -> None:
    await own.run("x = 1")
    (state,) = own.directory.glob("state/*.json")
    state.write_text(state.read_text().replace(boot_id(), "00000000-an-earlier-boot"))
    for pid in keepers(own.directory):
        os.kill(pid, signal.SIGKILL)
    said = await own.run("'x' in globals()")
    assert (said.value, said.started.restarted, said.started.kernel) == ("False", True, 2)
    assert said.started.reason == "The workspace has booted from its disk since."


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


async def test_starters_at_once_start_one_kernel(own: Pythons) -> None:
    made = await asyncio.gather(*(own.kernels.start("default") for _ in range(3)))
    assert {one.kernel for one in made} == {1}


async def test_nobody_else_can_enter(own: Pythons) -> None:
    await own.run("1")
    place = own.directory / "run/default"
    assert place.stat().st_mode & 0o777 == 0o700
    assert (place / "kernel.json").stat().st_mode & 0o777 == 0o600


async def test_a_kernel_that_cannot_be_remembered_is_not_started(own: Pythons) -> None:
    """Or a boot could lose its variables without a word."""
    (own.directory / "state").mkdir()
    (own.directory / "state/default.json.new").mkdir()
    with pytest.raises(PythonFailed, match="has to outlive a boot cannot be written"):
        await own.run("1")
    assert isinstance(await own.run("1", context="other"), Said)
