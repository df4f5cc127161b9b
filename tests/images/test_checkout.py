"""The image ``base``: a repository checked out in a workspace, an environment with what pip installed, a program of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perdure.sdk import Workspace
from tests.e2e.live import Live, serving, shell, until
from tests.images.hosts import Visitor, lose_host
from tests.images.shelf import Shelf

PORT = 5000
APP = f"""
import http.server, json, os
import greeting
visits = 0
class App(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global visits
        visits += 1
        body = json.dumps({{"text": greeting.greet("world"), "pid": os.getpid(), "visits": visits}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", {PORT}), App).serve_forever()
"""


@pytest.fixture(scope="module")
def live(base_image: Path, shelf: Shelf) -> Iterator[Live]:
    with serving(PERDURE_CHECKPOINT_INTERVAL_S="0", PERDURE_EGRESS_PRIVATE_ALLOW=shelf.address) as running:
        yield running


@dataclass
class Checkout:
    workspace: Workspace
    head: str
    visitor: Visitor

    def visit(self, workspace: Workspace | None = None) -> Any:
        return self.visitor.json(workspace or self.workspace, PORT, "/")

    def check(self, workspace: Workspace | None = None) -> None:
        """The commit, a clean tree, and an environment that imports what is installed in it alone."""
        where = workspace or self.workspace
        line = "git rev-parse HEAD && git status --porcelain && .venv/bin/python -c 'import greeting; print(greeting.__file__)'"
        head, module = shell(where, line, cwd="/root/app").splitlines()
        assert (head, module.startswith("/root/app/.venv/lib/")) == (self.head, True)
        assert "No module named" in shell(where, "python3 -c 'import greeting' 2>&1 || true")


@pytest.fixture(scope="module")
def checkout(live: Live, shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    digest = shelf.put_wheel("greeting", "2.1.0", "def greet(whom):\n    return f'hello {whom}'\n")
    files = {"app.py": APP, "requirements.txt": f"greeting==2.1.0 --hash=sha256:{digest}\n", ".gitignore": ".venv\n__pycache__\n"}
    head = shelf.commit("app", tmp_path_factory.mktemp("work") / "app", files)
    workspace = live.workspace("app", allow=[shelf.address])
    index = f"--index-url {shelf.url}/simple --trusted-host 127.0.0.2 --no-cache-dir"
    shell(workspace, f"git clone -q {shelf.url}/app.git /root/app && python3 -m venv /root/app/.venv")
    shell(workspace, f".venv/bin/pip install -q {index} --require-hashes -r requirements.txt", cwd="/root/app")
    workspace.commands.run([".venv/bin/python", "app.py"], cwd="/root/app", background=True)
    shell(workspace, f"until (exec 3<>/dev/tcp/127.0.0.1/{PORT}) 2> /dev/null; do sleep 0.5; done")
    return Checkout(workspace, head, Visitor(live))


def test_it_is_all_there_after_sleep(checkout: Checkout) -> None:
    """(peers: row 4)"""
    before = checkout.visit()
    assert before["text"] == "hello world"
    checkout.workspace.sleep()
    assert checkout.visit() == {**before, "visits": before["visits"] + 1}
    checkout.check()


def test_a_fork_has_its_own(checkout: Checkout) -> None:
    before = checkout.visit()
    (branch,) = checkout.workspace.fork(1, names=["other"])
    assert isinstance(branch, Workspace)
    assert [checkout.visit(branch)["visits"] for _ in range(2)] == [before["visits"] + 1, before["visits"] + 2]
    checkout.check(branch)
    shell(branch, "rm -rf .venv app.py", cwd="/root/app")
    checkout.check()
    assert checkout.visit() == {**before, "visits": before["visits"] + 1}
    branch.delete()


def test_a_lost_host_leaves_what_the_checkpoint_had(checkout: Checkout, live: Live) -> None:
    before = checkout.visit()
    checkout.workspace.checkpoint()
    checkout.visit()
    shell(checkout.workspace, "rm -rf .venv/lib && echo changed > app.py", cwd="/root/app")
    lose_host(live, checkout.workspace)
    until(lambda: checkout.workspace.refresh().state == "hibernated")
    assert checkout.visit() == {**before, "visits": before["visits"] + 1}
    checkout.check()
