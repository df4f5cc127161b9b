"""``perdure backup`` and its kin against a real server over fake services, and without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perdure.sdk import Client
from tests.fakes.api_server import FakeServer
from tests.fakes.backups import FakeBackups
from tests.integration.api.test_cli import Run, perdure

__all__ = ["perdure"]


def backups(server: FakeServer) -> FakeBackups:
    assert isinstance(server.services.backups, FakeBackups)
    return server.services.backups


def test_a_backup_tells_what_it_holds(perdure: Run, server: FakeServer, tmp_path: Path) -> None:
    done = perdure("backup", str(tmp_path))
    assert done.code == 0
    assert done.out == (
        "Backup bak_1 is complete: 2 workspaces, 2 snapshots, 1 image; 1.0 MB were sent\n"
        "demo ran: in the backup as of the last snapshot\n"
    )
    assert done.err.startswith("images: 1\nsnapshots: 2\n")
    assert "The master key is not in it." in done.err
    asked = backups(server).asked
    assert asked is not None and (asked.to, asked.with_master_key) == (str(tmp_path), False)


def test_the_master_key_is_said_loudly(perdure: Run, server: FakeServer, tmp_path: Path) -> None:
    done = perdure("backup --with-master-key", str(tmp_path))
    assert "The backup holds the master key" in done.err
    asked = backups(server).asked
    assert asked is not None and asked.with_master_key


def test_a_relative_directory_is_ours(perdure: Run, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the server runs in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    perdure("backup here")
    asked = backups(server).asked
    assert asked is not None and asked.to in (str(tmp_path / "here"), "here")


def test_a_url_goes_as_it_is(perdure: Run, server: FakeServer) -> None:
    perdure("backup s3://bucket/some/prefix")
    asked = backups(server).asked
    assert asked is not None and asked.to == "s3://bucket/some/prefix"


def test_json_is_one_line_a_step_and_the_backup_last(perdure: Run, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in perdure("backup --json", str(tmp_path)).out.splitlines()]
    assert [line["type"] for line in lines] == ["progress", "progress", "done"]
    assert lines[1] == {"type": "progress", "what": "snapshots", "name": "snp_1", "done": 1, "count": 2, "sent_bytes": 1000}
    assert lines[-1]["backup"]["id"] == "bak_1" and lines[-1]["backup"]["awake"] == ["demo"]


def test_what_is_left_out_is_named_and_in_the_exit_code(perdure: Run, server: FakeServer, tmp_path: Path) -> None:
    done = perdure("backup --skip-damaged", str(tmp_path))
    assert done.code == 3
    assert done.out.endswith(
        "! snapshot snp_2 of demo is in it without its memory: Its index is damaged.\n"
        "! snapshot snp_3 of other is not in it: Its disk is damaged.\n"
        "! the image of new is not in it: Its kernel is damaged.\n"
    )
    asked = backups(server).asked
    assert asked is not None and asked.skip_damaged
    as_json = perdure("backup --skip-damaged --json", str(tmp_path))
    assert as_json.code == 3
    left_out = json.loads(as_json.out.splitlines()[-1])["backup"]["left_out"]
    assert [one["snapshot"] for one in left_out] == ["snp_2", "snp_3", None]


def test_an_error_in_the_middle(perdure: Run, tmp_path: Path) -> None:
    done = perdure("backup", str(tmp_path / "full"))
    assert done.code == 1
    assert f"Error: There is no room left in {tmp_path}/full; no backup was made." in done.err
    as_json = perdure("backup --json", str(tmp_path / "full"))
    assert json.loads(as_json.err.splitlines()[-1])["error"]["code"] == "no_space"


def test_who_hangs_up_ends_the_backup(server: FakeServer, tmp_path: Path) -> None:
    with Client(settings=server.settings) as client:
        events = client.backup(str(tmp_path / "endless"))
        assert next(iter(events)).type == "progress"
        events.close()  # type: ignore[attr-defined]
    server.wait_for(backups(server).cancelled.is_set)


def test_recover_wants_a_name_or_the_store(perdure: Run) -> None:
    for words in ("recover", "recover demo --from-store"):
        done = perdure(words)
        assert done.code == 1
        assert "Either the name of a workspace or --from-store is needed, and not both." in done.err
