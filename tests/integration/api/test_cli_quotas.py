"""``perdure tenant quota``, ``tenant show`` and ``audit`` against a real server with real limits and a real audit."""

from __future__ import annotations

import json
import re
import signal
import subprocess

import pytest

from perdure.core.errors import MissingScope, QuotaExceeded
from perdure.sdk import Client, Workspace
from tests.fakes.api_server import FakeServer
from tests.integration.api.test_cli import PROGRAM, Run, environment, perdure
from tests.integration.api.test_cli_keys import server

__all__ = ["perdure", "server"]


def test_limits_beside_what_is_used(perdure: Run) -> None:
    perdure("tenant create acme")
    line = "tenant quota acme --workspaces 10 --memory-awake-mib 4096 --storage-gib 50 --execs 64"
    shown = perdure(line).out.splitlines()
    assert re.fullmatch(r"acme \(ten_\w+\)", shown[0])
    assert [text.split() for text in shown[1:]] == [
        ["USED", "LIMIT"],
        ["workspaces", "0", "10"],
        ["memory", "awake,", "MiB", "0", "4096"],
        ["storage,", "GiB", "0", "50"],
        ["commands", "running", "0", "64"],
    ]
    assert perdure("tenant show acme").out.splitlines() == shown
    changed = perdure("tenant quota acme --workspaces none --storage-gib 0.5 --json").json
    assert changed["limits"] == {"workspaces": None, "memory_awake_mib": 4096, "storage_gib": 0.5, "execs": 64}
    assert perdure("tenant show acme --json").json == changed
    own = perdure("tenant show --json").json
    assert (own["name"], set(own["limits"].values()), own["awake"]) == ("default", {None}, [])


MISTAKES = [
    ("tenant quota acme", 1, "No limit was given."),
    ("tenant quota", 2, "Missing argument 'TENANT'"),
    ("tenant quota nobody --execs 1", 1, "There is no tenant 'nobody'."),
    ("tenant quota default --execs many", 1, "'many' is no limit."),
    ("tenant quota default --execs 1.5", 1, "'1.5' is no limit."),
    ("tenant quota default --execs=-1", 1, "execs: "),
    ("tenant quota default --storage-gib nan", 1, "storage_gib: "),
    ("tenant show nobody", 1, "There is no tenant 'nobody'."),
    ("audit --since soon", 1, "--since 'soon' is not a time."),
    ("audit --since 999999999w", 1, "is not a time."),
    ("audit --tenant nobody", 1, "There is no tenant 'nobody'."),
]


def test_mistakes_are_one_sentence(perdure: Run, subtests: pytest.Subtests) -> None:
    for line, code, says in MISTAKES:
        with subtests.test(line):
            answer = perdure(line)
            assert (answer.code, answer.out) == (code, "")
            assert says in answer.err
            assert perdure(f"{line} --json").error["message"]


def test_who_did_what(perdure: Run, server: FakeServer) -> None:
    assert perdure("audit").out == "Nothing was done or refused in that time.\n"
    perdure("tenant create acme")
    secret = perdure("key create agent --scope read --tenant acme").out.strip()
    with Client(url=server.url, api_key=secret) as client:
        for refused in (client.tenants, client.audit):
            with pytest.raises(MissingScope):
                refused()
    lines = perdure("audit").out.splitlines()
    assert lines[0].split() == ["TIME", "WHO", "WHAT", "ABOUT", "OUTCOME", "FROM"]
    assert [re.split(r"  +", text)[1:] for text in lines[1:3]] == [
        ["local", "create_tenant", perdure("tenant ls --json").json["tenants"][1]["id"], "ok", "unix"],
        ["local", "create_key", perdure("key ls --tenant acme --json").json["keys"][0]["id"], "ok", "unix"],
    ]
    assert [re.split(r"  +", text)[2:] for text in lines[3:]] == [
        ["list_tenants", "-", "missing_scope", "127.0.0.1"],
        ["audit", "-", "missing_scope", "127.0.0.1"],
    ]
    found = perdure("audit --tenant acme --since 2020-01-01 --json").json["rows"]
    assert [(row["route"], row["outcome"], row["repeated"]) for row in found] == [
        ("list_tenants", "missing_scope", 1),
        ("audit", "missing_scope", 1),
    ]
    assert perdure("audit --since 2999-01-01 --json").json == {"rows": []}
    assert secret not in perdure("audit --json").out


@pytest.mark.parametrize("flag", ["--json", ""])
def test_following_until_interrupted(perdure: Run, server: FakeServer, flag: str) -> None:
    perdure("tenant create acme")
    command = [*PROGRAM, "audit", "--follow", *flag.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(server)) as process:
        assert process.stdout is not None
        assert b"create_tenant" in process.stdout.readline()
        perdure("key create agent --scope read")
        line = process.stdout.readline()
        assert b"create_key" in line and (not flag or json.loads(line)["outcome"] == "ok")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")


def test_a_limit_refuses_on_the_command_line(perdure: Run, server: FakeServer) -> None:
    perdure("create demo")
    perdure("tenant quota default --storage-gib 0")
    written = perdure("cp /etc/hostname demo:/x --json")
    assert (written.code, written.error["code"], written.error["details"]["quota"]) == (1, "quota_exceeded", "storage_gib")
    with Client(settings=server.settings) as client, pytest.raises(QuotaExceeded, match="The tenant stores 0 of 0 GiB"):
        Workspace.connect("demo", client=client).files.write("/x", b"x")
