"""The image ``node``: a repository checked out in a workspace, with what npm installed for it, and its development server.

Git and npm go through the egress gateway to a registry of the test's own; whoever asks the server comes by the workspace's port.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perdure.sdk import CommandHandle, Workspace
from tests.e2e.live import DEADLINE_S, Live, serving, shell, until
from tests.images.hosts import Visitor, lose_host
from tests.images.shelf import Package, Shelf

PORT = 3000
PACKAGES = {
    one.name: one
    for one in (
        Package(
            "greeting",
            "2.1.0",
            {"index.js": "module.exports = (text) => require('shout')(`hello ${text}`);"},
            {"shout": "^1.0.0"},
        ),
        Package("shout", "1.0.4", {"index.js": "module.exports = (text) => text.toUpperCase() + '!';"}),
    )
}
#: What it counts is in its memory only. It looks after page.txt as development servers look after their sources.
SERVER = f"""
const fs = require("fs"), http = require("http"), path = require("path");
const greeting = require("greeting");
const page = path.join(__dirname, "page.txt");
let counter = 0, reloads = 0, text = fs.readFileSync(page, "utf8").trim();
fs.watch(__dirname, (_event, name) => {{
  if (name !== "page.txt") return;
  const now = fs.readFileSync(page, "utf8").trim();
  if (now !== text) {{ text = now; reloads += 1; }}
}});
http.createServer((request, response) => {{
  if (request.url === "/count") counter += 1;
  response.setHeader("content-type", "application/json");
  response.end(JSON.stringify({{ pid: process.pid, counter, reloads, page: greeting(text) }}));
}}).listen({PORT}, "127.0.0.1", () => console.log("ready"));
"""
MANIFEST = """{
  "name": "site", "version": "1.0.0", "private": true,
  "scripts": { "dev": "node server.js" },
  "dependencies": { "greeting": "2.1.0" }
}
"""


@pytest.fixture(scope="module")
def live(base_image: Path, shelf: Shelf) -> Iterator[Live]:
    with serving(PERDURE_CHECKPOINT_INTERVAL_S="0", PERDURE_EGRESS_PRIVATE_ALLOW=shelf.address) as running:
        yield running


@dataclass
class Project:
    """The checkout and its server."""

    workspace: Workspace
    head: str
    dev: CommandHandle
    visitor: Visitor

    def ask(self, workspace: Workspace | None = None) -> Any:
        return self.visitor.json(workspace or self.workspace, PORT, "/")

    def more(self, workspace: Workspace | None = None) -> int:
        told: int = self.visitor.json(workspace or self.workspace, PORT, "/count")["counter"]
        return told

    def write(self, text: str, workspace: Workspace | None = None) -> None:
        """Edit the page's source, and wait until the server has seen it."""
        where = workspace or self.workspace
        where.files.write("/root/site/page.txt", f"{text}\n")
        until(lambda: self.ask(where)["page"] == f"HELLO {text.upper()}!")


@pytest.fixture(scope="module")
def project(live: Live, shelf: Shelf, built: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Project:
    for package in PACKAGES.values():
        shelf.put(package)
    files = {
        "package.json": MANIFEST,
        "package-lock.json": shelf.lock("site", PACKAGES),
        "server.js": SERVER,
        "page.txt": "world\n",
        ".gitignore": "node_modules\n",
    }
    head = shelf.commit("site", tmp_path_factory.mktemp("work") / "site", files)
    workspace = live.workspace("site", image=built("node"), allow=[shelf.address])
    shell(workspace, f"git clone -q {shelf.url}/site.git /root/site")
    shell(workspace, f"npm config set --location=user registry {shelf.url}/ && npm ci", cwd="/root/site")
    dev = workspace.commands.run(["npm", "run", "dev"], cwd="/root/site", background=True)
    assert isinstance(dev, CommandHandle)
    made = Project(workspace, head, dev, Visitor(live))
    shell(workspace, f"until (exec 3<>/dev/tcp/127.0.0.1/{PORT}) 2> /dev/null; do sleep 0.5; done")
    return made


def check_checkout(project: Project, workspace: Workspace) -> None:
    """The commit, a clean tree but for the page that the tests edit, and every installed package as its lock says."""
    where = {"cwd": "/root/site"}
    assert shell(workspace, "git rev-parse HEAD && git status --porcelain -- . ':!page.txt'", **where) == project.head
    listed = shell(workspace, "npm ls --all --parseable", **where).split()
    assert listed == ["/root/site", "/root/site/node_modules/greeting", "/root/site/node_modules/shout"]


def test_npm_installs_what_the_lock_says(project: Project, shelf: Shelf) -> None:
    check_checkout(project, project.workspace)
    for package in PACKAGES.values():
        assert f"/{package.name}-{package.version}.tgz" in shelf.asked
    answer = project.ask()
    assert (answer["page"], answer["counter"], answer["reloads"]) == ("HELLO WORLD!", 0, 0)
    assert shell(project.workspace, f"tr '\\0' ' ' < /proc/{answer['pid']}/cmdline") == "node server.js"


def test_a_package_is_added_and_a_lock_that_lies_is_refused(project: Project, shelf: Shelf) -> None:
    """``npm install`` by name, as opposed to from a lock; and a tarball that is not what a lock promised installs nothing."""
    shelf.put(Package("later", "0.3.0", {"index.js": "module.exports = 3;"}))
    shell(project.workspace, "mkdir -p /root/other && cd /root/other && npm init -y && npm install later")
    assert shell(project.workspace, "node -p 'require(\"later\")'", cwd="/root/other") == "3"
    lie = "sed -i 's#sha512-[^\"]*#sha512-AAAA#' package-lock.json && rm -rf node_modules && npm cache clean --force"
    done = project.workspace.commands.run(f"{lie} && npm ci", cwd="/root/other", run_limit_s=240)
    assert (done.exit_code, "EINTEGRITY" in done.stderr) == (1, True), done
    shell(project.workspace, "[ ! -e /root/other/node_modules/later ]")


def test_the_server_goes_on_after_sleep(project: Project) -> None:
    """The same process and count over the ingress, which wakes it; it sees the next edit; its command is attached to again; and
    the checkout is all there (peers: row 4)."""
    before = project.ask()
    counted = project.more()
    project.workspace.sleep()
    assert project.workspace.refresh().state == "hibernated"
    after = project.ask()
    assert (after["pid"], after["counter"]) == (before["pid"], counted)
    assert project.more() == counted + 1
    project.write("again")
    check_checkout(project, project.workspace)
    with closing(project.workspace.commands.attach(project.dev.exec_id).follow(DEADLINE_S)) as outputs:
        assert any("ready" in output.text for output in outputs)


def test_a_fork_has_a_server_of_its_own(project: Project) -> None:
    counted = project.more()
    (branch,) = project.workspace.fork(1, names=["branch"])
    assert isinstance(branch, Workspace)
    ours, theirs = project.ask(), project.ask(branch)
    assert theirs == ours, "the same process, at the same count"
    assert [project.more(branch) for _ in range(3)] == [counted + 1, counted + 2, counted + 3]
    project.write("branch", branch)
    assert project.ask() == ours, "nothing of that reached the parent"
    check_checkout(project, branch)
    branch.delete()


def test_a_lost_host_leaves_what_the_checkpoint_had(project: Project, live: Live) -> None:
    project.write("checkpointed")
    counted = project.more()
    kept = project.ask()
    project.workspace.checkpoint()
    project.more()
    project.write("lost")
    shell(project.workspace, "rm -rf node_modules/shout", cwd="/root/site")
    lose_host(live, project.workspace)
    until(lambda: project.workspace.refresh().state == "hibernated")
    assert project.ask() == kept
    assert project.more() == counted + 1
    report = project.workspace.resume_report()
    assert report is not None and report.memory == "kept"
    assert shell(project.workspace, "cat page.txt", cwd="/root/site") == "checkpointed"
    check_checkout(project, project.workspace)
