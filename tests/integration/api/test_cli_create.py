"""``perdure create`` while it takes its time: what it says, and when."""

from __future__ import annotations

import asyncio
import signal
import subprocess

import pytest

from perdure.core.errors import NoSpace
from tests.fakes.api_server import FakeServer
from tests.integration.api.test_cli import PROGRAM, Run, environment, perdure

__all__ = ["perdure"]  # the fixture


def create_held_up(server: FakeServer, options: str = "") -> subprocess.Popen[str]:
    """A create in a process of its own, whose server takes its time until ``let_go``."""
    server.workspaces.hold = asyncio.Event()
    command = [*PROGRAM, "create", "slow", *options.split()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(server), text=True)


def let_go(server: FakeServer) -> None:
    async def work() -> None:
        assert server.workspaces.hold is not None
        server.workspaces.hold.set()

    server.run(work)


def test_a_first_boot_says_why_nothing_happens(server: FakeServer) -> None:
    with create_held_up(server, "--memory-mib 1024") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "Booting base with 1024 MiB and 1 CPU once; it takes about half a minute.\n"
        let_go(server)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "slow is awake: base, 1024 MiB, 1 CPU, 8 GiB disk, vm-emulated\n", "")


@pytest.mark.parametrize("options", ["", "--memory-mib 1024 --json"], ids=["a size that is ready", "json"])
def test_what_boots_nothing_or_speaks_json_makes_no_remark(server: FakeServer, options: str) -> None:
    with create_held_up(server, options) as process:
        server.wait_for(lambda: (bool(options) and bool(server.workspaces.rows)) or server.workspaces.lookups > 0)
        let_go(server)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "slow" in out


def test_a_refusal_that_takes_its_time_is_all_that_is_said(server: FakeServer) -> None:
    server.workspaces.refuse = NoSpace("The disk is full.", hint="Make room.")
    with create_held_up(server, "--memory-mib 1024") as process:
        server.wait_for(lambda: server.workspaces.lookups > 1)
        let_go(server)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (1, "", "Error: The disk is full.\nMake room.\n")


def test_what_is_allowed_in_vain_is_told(perdure: Run) -> None:
    said = (
        "127.0.0.1:8080 is refused: 127.0.0.1 is a loopback address, which the operator must allow too "
        "(PERDURE_EGRESS_PRIVATE_ALLOW=127.0.0.1:8080)."
    )
    made = perdure("create demo --allow 127.0.0.1:8080 --allow example.org:443")
    assert (made.code, made.err) == (0, f"! {said}\n")
    assert perdure("create other --allow 127.0.0.1:8080 --json").json["warnings"] == [said]
    assert perdure("create third --json").json["warnings"] == []


def test_a_create_that_is_interrupted_says_that_it_goes_on(server: FakeServer) -> None:
    with create_held_up(server) as process:
        server.wait_for(lambda: bool(server.workspaces.rows))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    let_go(server)
    assert (process.returncode, err) == (130, "Interrupted. Workspaces and what runs in them go on.\n")
