"""The one way out of a workspace, and its own API, from programs inside a real machine: curl, pip, git.

The servers they reach run in this test on 127.0.0.2, which the operator opens (PERDURE_EGRESS_PRIVATE_ALLOW) and which, unlike
127.0.0.1, no program takes for the workspace's own loopback.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from perdure.gateway.egress import own_addresses
from perdure.sdk import CommandHandle, Workspace
from tests.e2e.live import Live, attempt, serving, shell, until

pytestmark = [pytest.mark.qemu, pytest.mark.slow, pytest.mark.timeout(900)]

HOST = "127.0.0.2"
API = "http://127.0.0.1:7071/v1/workspace"
#: Asks twice over one connection; the second time when it is told to. What it heard is in /run/heard.
HOLDER = """
import http.client, json, os, select
connection = http.client.HTTPConnection("127.0.0.1:7071")
def ask():
    connection.request("GET", "/v1/workspace")
    return json.loads(connection.getresponse().read())["id"]
print(ask(), flush=True)
while not os.path.exists("/run/go"):
    select.select([], [], [], 0.1)
try:
    heard = ask()
except OSError as error:
    heard = type(error).__name__
print(heard, flush=True)
"""


@dataclass
class Site:
    """Files that the host serves."""

    directory: Path
    port: int
    asked: list[str]

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


class _Handler(SimpleHTTPRequestHandler):
    asked: list[str]

    def __init__(self, asked: list[str], *arguments: Any, **options: Any) -> None:
        self.asked = asked
        super().__init__(*arguments, **options)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        self.asked.append(self.path)

    def log_message(self, format: str, *arguments: Any) -> None:
        return None


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    asked: list[str] = []
    (directory / "hello").write_text("hello from the host\n")
    with ThreadingHTTPServer((HOST, 0), partial(_Handler, asked, directory=str(directory))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Site(directory, server.server_port, asked)
        server.shutdown()


@pytest.fixture(scope="module")
def live(base_image: Path, site: Site) -> Iterator[Live]:
    with serving(PERDURE_EGRESS_PRIVATE_ALLOW=f"{HOST}:{site.port}") as server:
        yield server


@pytest.fixture(scope="module")
def closed(live: Live) -> Workspace:
    """A workspace as it is without a word about egress."""
    return live.workspace("closed", checkpoint_interval_s=0)


@pytest.fixture(scope="module")
def node_address() -> str:
    """An address of this host that is not a loopback one, as a program would write it."""
    found = sorted(str(one) for one in own_addresses() if one.version == 4 and not one.is_loopback)
    return found[0] if found else "127.0.0.3"


@pytest.fixture(scope="module")
def opened(live: Live, site: Site, node_address: str) -> Workspace:
    """A workspace whose owner allows more than the operator does."""
    allowed = [
        f"{HOST}:{site.port}",
        f"localhost:{site.port}",
        "169.254.169.254:80",
        "169.254.7.7:80",
        f"{node_address}:{site.port}",
    ]
    made = live.ok("create", "opened", "--json", *(word for entry in allowed for word in ("--allow", entry))).json
    assert made["workspace"]["egress_allow"] == allowed
    return Workspace.connect("opened", client=live.client)


def through_proxy(workspace: Workspace, url: str) -> tuple[int, str]:
    """Status and body that curl gets when nothing goes around the proxy."""
    line = f"curl -sS --max-time 60 --noproxy '' -w '\\n%{{http_code}}' {shlex.quote(url)}"
    body, _, status = shell(workspace, line).rpartition("\n")
    return int(status), body.strip()


# ---------------------------------------------------------------------------------------------------------------- rules


def test_nothing_is_allowed_by_default_and_that_is_said(closed: Workspace, site: Site) -> None:
    status, body = through_proxy(closed, f"{site.url}/hello")
    assert status == 403
    refused = f"{HOST}:{site.port}"
    assert (
        body == f"{refused} is refused: it is not on this workspace's allow list (create the workspace with --allow {refused})."
    )
    assert "/hello" not in site.asked
    assert through_proxy(closed, "http://example.org/")[0] == 403
    told = attempt(closed, "git clone http://example.org/x.git /root/x")
    assert told.exit_code == 128 and "example.org:80 is refused" in told.stderr


def test_what_both_allow_is_reached(opened: Workspace, site: Site) -> None:
    assert through_proxy(opened, f"{site.url}/hello") == (200, "hello from the host")
    assert shell(opened, f"curl -sS -p {site.url}/hello") == "hello from the host", "CONNECT too, by the environment"


@pytest.mark.parametrize("kind", ["name", "metadata", "link-local", "node"])
def test_an_address_that_is_not_public_needs_the_operator_too(
    opened: Workspace, site: Site, node_address: str, kind: str
) -> None:
    """A name that resolves to a loopback address; the metadata service; a neighbour; the node itself, which some hosts number
    from a range that is never reached."""
    host = {"name": "localhost", "metadata": "169.254.169.254", "link-local": "169.254.7.7", "node": node_address}[kind]
    port = site.port if kind in {"name", "node"} else 80
    heard = len(site.asked)
    status, body = through_proxy(opened, f"http://{host}:{port}/hello")
    assert status == 403
    assert f"{host}:{port} is refused: " in body
    assert ("operator must allow" in body) or (kind == "node" and "no workspace connects" in body), body
    assert len(site.asked) == heard


def test_another_port_of_an_allowed_host_is_refused(opened: Workspace, site: Site) -> None:
    other = site.port % 65535 + 1
    status, body = through_proxy(opened, f"http://{HOST}:{other}/")
    assert status == 403 and "allow list" in body


def test_an_allowed_host_that_is_down_is_a_failure_and_no_refusal(live: Live, site: Site) -> None:
    """502 and the reason, so that nobody looks for the fault in a rule."""
    workspace = live.workspace("down", allow=["no-such-host.invalid:80"], checkpoint_interval_s=0)
    status, body = through_proxy(workspace, "http://no-such-host.invalid/")
    assert status == 502 and "no-such-host.invalid" in body
    workspace.delete()


def test_the_rules_and_their_use_outlive_sleep(opened: Workspace, closed: Workspace, site: Site) -> None:
    for workspace, status in ((opened, 200), (closed, 403)):
        workspace.sleep()
        assert through_proxy(workspace, f"{site.url}/hello")[0] == status


# ---------------------------------------------------------------------------------------------------------------- tools


def test_pip_installs_from_an_index_on_the_host(opened: Workspace, site: Site) -> None:
    _publish_wheel(site.directory / "simple" / "perdure-greeting")
    options = f"--index-url {site.url}/simple --trusted-host {HOST} --disable-pip-version-check --no-cache-dir"
    shell(opened, f"pip install {options} --target /root/lib perdure-greeting")
    assert shell(opened, "PYTHONPATH=/root/lib python3 -c 'import perdure_greeting; print(perdure_greeting.TEXT)'") == "it works"


def _publish_wheel(directory: Path) -> None:
    """A wheel (PEP 427) and its page of a simple index (PEP 503)."""
    directory.mkdir(parents=True)
    info = "perdure_greeting-1.0.dist-info"
    members = {
        "perdure_greeting.py": "TEXT = 'it works'\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: perdure-greeting\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    members[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*members, f"{info}/RECORD"])
    wheel = directory / "perdure_greeting-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (directory / "index.html").write_text(f'<a href="{wheel.name}#sha256={digest}">{wheel.name}</a>')


def test_git_clones_from_a_server_on_the_host(opened: Workspace, site: Site, tmp_path: Path) -> None:
    def git(*words: str) -> str:
        names = ("-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "init.defaultBranch=main")
        return subprocess.run(["git", *names, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "work")
    (tmp_path / "work" / "file").write_text("tracked\n")
    git("-C", "work", "add", "file")
    git("-C", "work", "commit", "-m", "one")
    git("clone", "--bare", "work", str(site.directory / "work.git"))
    git("-C", str(site.directory / "work.git"), "update-server-info")
    shell(opened, f"git clone {site.url}/work.git /root/work")
    assert shell(opened, "git -C /root/work rev-parse HEAD; cat /root/work/file").split() == [
        git("-C", "work", "rev-parse", "HEAD"),
        "tracked",
    ]


# -------------------------------------------------------------------------------------------------------- the guest's API


def test_a_workspace_sees_itself_and_nothing_else(opened: Workspace, closed: Workspace) -> None:
    for workspace in (opened, closed):
        seen = json.loads(shell(workspace, f"curl -sS {API}"))
        assert (seen["id"], seen["name"]) == (workspace.id, workspace.name)
        assert seen["generation"] == workspace.refresh().generation
    told = json.loads(shell(closed, f"curl -sS {API}s/{opened.id}"))
    assert told["error"]["code"] == "not_found"
    told = json.loads(shell(closed, "curl -sS -H 'Host: evil.example' http://127.0.0.1:7071/v1/workspace"))
    assert told["error"]["code"] == "forbidden"


def test_a_workspace_keeps_itself_awake_while_another_falls_asleep(live: Live) -> None:
    pair = [live.workspace(name, idle_timeout_s=5.0, checkpoint_interval_s=0) for name in ("wakeful", "sleepy")]
    wakeful, sleepy = pair
    line = "curl -sS -X POST -H 'Content-Type: application/json' -d '{\"seconds\": 3600}' " + f"{API}/keep-awake"
    answered = json.loads(shell(wakeful, line))
    assert answered["keep_awake_until"] is not None
    shell(sleepy, "true")
    until(lambda: sleepy.refresh().state == "hibernated")
    assert wakeful.refresh().state == "running"
    wakeful.keep_awake(0)
    until(lambda: wakeful.refresh().state == "hibernated")
    for workspace in pair:
        workspace.delete()


@pytest.mark.long
def test_a_connection_to_the_api_does_not_survive_into_a_fork(closed: Workspace) -> None:
    """The parent's goes on; the branch's is reset, and its next one is the branch's own."""
    holder = closed.commands.run(["python3", "-c", HOLDER], background=True)
    assert isinstance(holder, CommandHandle)
    said = iter(holder)
    assert next(said).data.decode().strip() == closed.id
    (branch,) = closed.fork(1, names=["branch"])
    assert isinstance(branch, Workspace)
    report = branch.resume_report()
    assert report is not None and report.connections_dropped >= 1
    assert holder.exec_id in report.execs_running
    for workspace, heard in ((branch, "ConnectionResetError"), (closed, closed.id)):
        shell(workspace, "touch /run/go")
        end = workspace.commands.attach(holder.exec_id).wait(timeout=120)
        assert end.stdout.split() == [closed.id, heard]
    assert json.loads(shell(branch, f"curl -sS {API}"))["id"] == branch.id
    branch.delete()
