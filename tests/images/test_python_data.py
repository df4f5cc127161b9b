"""The image ``python-data``: a data set in memory and the chart drawn from it, in a kernel that lives as its workspace does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.core.errors import KernelDied, PythonMissing
from perdure.sdk import PythonResult, Workspace
from tests.e2e.live import Live, shell, until
from tests.images.hosts import lose_host

LOAD = """
import hashlib, os
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

random = np.random.default_rng(7)
frame = pd.DataFrame({"day": np.arange(20_000) % 365, "sales": random.gamma(2.0, 50.0, 20_000)})
months = frame.groupby(frame.day // 31).sales.mean()

def held():
    return f"{hashlib.sha256(frame.to_numpy().tobytes()).hexdigest()[:16]} {len(frame)} {os.getpid()}"

def draw():
    figure, axes = plt.subplots(figsize=(4, 3))
    axes.plot(months.index, months.to_numpy())
    axes.set_title(f"{len(frame)} sales")
    plt.show()

print(held())
"""


@pytest.fixture(scope="module")
def data(live: Live, built: Callable[[str], str]) -> Workspace:
    """A workspace with the data set loaded."""
    workspace = live.workspace("data", image=built("python-data"), idle_timeout_s=0)
    loaded = said(workspace, LOAD)
    assert not loaded.restarted and loaded.kernel == 1
    return workspace


def said(workspace: Workspace, code: str, **options: float) -> PythonResult:
    """What a cell gives that succeeds."""
    result = workspace.python.run(code, **options)  # type: ignore[arg-type]
    assert result.ok, result
    return result


def held(workspace: Workspace) -> str:
    """Hash and length of the data, and the kernel's pid."""
    result = said(workspace, "held()")
    assert not result.restarted and result.text is not None
    return result.text


def chart(workspace: Workspace) -> bytes:
    result = said(workspace, "draw()")
    assert result.png is not None and result.png.startswith(b"\x89PNG") and len(result.png) > 5000
    return result.png


def test_a_data_set_and_its_chart_survive_sleep_fork_and_the_loss_of_the_host(live: Live, data: Workspace) -> None:
    before, picture = held(data), chart(data)
    assert said(data, "frame.head(2)").results[-1].html is not None

    data.sleep()
    assert (held(data), data.report and data.report.memory) == (before, "kept")
    assert chart(data) == picture

    (child,) = data.fork(1)
    assert isinstance(child, Workspace)
    assert (held(child), chart(child)) == (before, picture)
    said(child, "frame.drop(frame.index[:5000], inplace=True)")
    assert (held(child).split()[1], held(data)) == ("15000", before)

    data.checkpoint("loaded")
    said(data, "frame.drop(frame.index[:1000], inplace=True)")
    lose_host(live, data, child)
    again = Workspace.connect("data", client=live.client)
    assert again.report is not None and again.report.memory == "kept"
    assert (held(again), chart(again)) == (before, picture), "what the checkpoint had"
    child.delete()


def test_a_rewind_brings_back_variables(data: Workspace) -> None:
    said(data, "note = 'before'")
    data.checkpoint("noted")
    said(data, "note = 'after'")
    data.rewind("noted")
    assert said(data, "note").text == "'before'"


def test_a_kernel_that_waits_lets_its_workspace_sleep_and_a_cell_that_runs_does_not(data: Workspace) -> None:
    running = threading.Event()
    work = threading.Thread(
        target=lambda: data.python.run("print('on')\nimport time\ntime.sleep(30)", on_stdout=lambda _text: running.set())
    )
    data.configure(idle_timeout_s=5.0)
    work.start()
    assert running.wait(120)
    idle = data.refresh().idle
    assert idle is not None and "command" in [one.use for one in idle.reasons]
    assert data.python.interrupt() is True
    work.join(120)
    until(lambda: data.refresh().state.value == "hibernated")
    assert not said(data, "1").restarted
    data.configure(idle_timeout_s=0)


def test_what_kills_a_kernel_is_told_and_the_next_one_says_that_it_is_new(data: Workspace) -> None:
    said(data, "kept = 1", context="trial")
    with pytest.raises(KernelDied, match="exited with code 3"):
        data.python.run("import os\nos._exit(3)", context="trial")
    result = data.python.run("'kept' in globals()", context="trial")
    assert (result.text, result.restarted, result.kernel) == ("False", True, 2)
    with pytest.raises(KernelDied, match="out of memory") as caught:
        data.python.run("held = [bytearray(b'x' * (64 << 20)) for _ in range(64)]", context="trial")
    assert caught.value.details["reason"] == "out-of-memory" and "--memory-mib" in caught.value.hint
    assert said(data, "len(frame)").text == "20000", "the other kernel was not the one that was killed"


def test_a_boot_from_disk_is_told_by_the_next_cell(data: Workspace) -> None:
    said(data, "kept = 1")
    data.sleep()
    data.recover("disk-boot")
    result = data.python.run("'kept' in globals()")
    assert (result.text, result.restarted, result.reason) == (
        "False",
        True,
        "The workspace has booted from its disk since.",
    )
    assert not data.python.run("1").restarted


def test_no_other_user_reaches_a_kernel(data: Workspace) -> None:
    said(data, "1")
    code = "import socket; socket.socket(socket.AF_UNIX).connect('/run/perdure-python/default/socket')"
    done = data.commands.run(["python3", "-c", code], user="nobody", cwd="/")
    assert done.exit_code != 0 and "PermissionError" in done.stderr


def test_in_an_image_without_ipykernel_it_says_what_to_do(live: Live) -> None:
    plain = live.workspace("plain")
    with pytest.raises(PythonMissing, match="ipykernel") as caught:
        plain.python.run("1")
    assert "python-data" in caught.value.hint
    until(lambda: plain.commands.list()[-1].outcome is not None)  # nothing goes on waiting for a kernel
    plain.delete()


def test_the_command_line_saves_what_is_drawn(live: Live, data: Workspace, tmp_path: Path) -> None:
    shell(data, "true")
    code = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\n6 * 7"
    answer = live.ok("python", "data", code, "--save", str(tmp_path), "--json", "--context", "pictures")
    document = json.loads(answer.out)
    assert document["text"] == "42"
    assert (tmp_path / "output-1.png").read_bytes().startswith(b"\x89PNG")
    failed = live.run("python", "data", "1 / 0")
    assert failed.code == 1 and "ZeroDivisionError" in failed.complaint
