"""What a stop tells survives its way through the file, and what systemd hears is what it understands."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.core import supervisor
from perdure.core.stop import Left, StopReport


def test_a_report_is_read_as_it_was_told(tmp_path: Path) -> None:
    report = StopReport(0, ("a",), ("b",), ("b: It is slow.",), (Left("wsp_1", "c", "It broke.", lost=True),))
    report.write(tmp_path / "stop.json")
    read = StopReport.read(tmp_path / "stop.json", os.getpid())
    assert read == replace(report, pid=os.getpid())


def test_the_report_of_another_server_is_none_of_ours(tmp_path: Path) -> None:
    StopReport().write(tmp_path / "stop.json")
    assert StopReport.read(tmp_path / "stop.json", os.getpid() + 1) is None


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff", b'{"pid": 1, "asleep": [], "waiting": [], "troubles": [], "left": [{}]}']
)
def test_what_cannot_be_read_is_no_report(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "stop.json").write_bytes(content)
    assert StopReport.read(tmp_path / "stop.json", 1) is None


@pytest.mark.parametrize("abstract", [False, True])
def test_the_supervisor_hears_what_it_understands(tmp_path: Path, abstract: bool) -> None:
    name = f"@perdure-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(name.replace("@", "\0", 1) if abstract else name)
        listener.settimeout(30)
        supervisor.notify(name, supervisor.STOPPING, supervisor.more_time(60), supervisor.status("2 to come"))
        assert listener.recv(1000) == b"STOPPING=1\nEXTEND_TIMEOUT_USEC=60000000\nSTATUS=2 to come"


@pytest.mark.parametrize("address", [None, "", "/nonexistent/socket"])
def test_a_supervisor_that_does_not_listen_is_no_trouble(address: str | None) -> None:
    supervisor.notify(address, supervisor.READY)
