"""Rewind, promote and forks of a real machine: whose memory, whose files, whose handles, whose connections."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from perdure.sdk import Workspace
from tests.e2e.live import Live, serving, shell

pytestmark = [pytest.mark.qemu, pytest.mark.slow, pytest.mark.timeout(900)]

#: Holds a number, the handle it was given when it learned the number, and a connection to the API that it opened then.
PROGRAM = """
import json, os, socket, urllib.error, urllib.request
BASE = "http://127.0.0.1:7071/v1/workspace"
def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(BASE + path, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
def learn(number):
    global held, handle, line
    held, handle = number, ask("/handle")[1]["handle"]
    line = socket.create_connection(("127.0.0.1", 7071))
def old_line():
    try:
        line.settimeout(30)
        line.sendall(b"GET /v1/workspace HTTP/1.1\\r\\nhost: localhost\\r\\n\\r\\n")
        return line.recv(12).decode()
    except OSError as error:
        return type(error).__name__
learn("0")
for name in ("/run/holder.in", "/run/holder.out"):
    os.mkfifo(name)
while True:
    words = open("/run/holder.in").read().split()
    if words[0] == "learn":
        learn(words[1])
    answer = {"tell": lambda: f"{held} {handle}", "learn": lambda: f"{held} {handle}", "line": old_line,
              "check": lambda: str(ask("/handle/check", {"handle": words[1]})[0]),
              "mine": lambda: str(ask("/handle/check", {"handle": handle})[0])}[words[0]]()
    open("/run/holder.out", "w").write(answer + "\\n")
"""


class Holder:
    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def start(self) -> None:
        self.workspace.files.write("/root/holder.py", PROGRAM.encode())
        self.workspace.commands.run(["python3", "/root/holder.py"], background=True)
        shell(self.workspace, "until [ -p /run/holder.out ]; do sleep 0.1; done")

    def ask(self, words: str) -> str:
        return shell(self.workspace, f"echo {words} > /run/holder.in && cat /run/holder.out")


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(PERDURE_CHECKPOINT_INTERVAL_S="0") as live:
        yield live


def rewinds(holder: Holder, first: str, machine_id: str) -> None:
    """What comes after the snapshot is given up by the rewind, with its handles and connections."""
    parent = holder.workspace
    holder.ask("learn 1")
    shell(parent, "echo late > /root/late && sync")
    report = parent.rewind("early")
    assert (report.memory, report.disk) == ("kept", "rewound")
    assert holder.ask("tell").split() == ["0", first]
    assert shell(parent, "ls /root/late 2>/dev/null || echo gone") == "gone"
    assert shell(parent, "cat /etc/machine-id") == machine_id
    assert holder.ask("mine") == "403", "an older generation's handle counts no more"
    assert not holder.ask("line").startswith("HTTP/1.1 200"), "nor does a connection"


def forks(holder: Holder, own: str) -> tuple[Holder, Holder, str]:
    """Nobody can use what another holds, in any direction, nor see its files. Returns the children and the first one's handle."""
    parent = holder.workspace
    left, right = (Holder(one) for one in parent.fork(2, names=["left", "right"]) if isinstance(one, Workspace))
    assert holder.ask("mine") == "200", "a checkpoint does not change the parent's generation"
    for child in (left, right):
        assert child.ask("tell").split() == ["2", own], "it has the parent's in its memory"
        assert child.ask("mine") == "403"
        assert not child.ask("line").startswith("HTTP/1.1 200")
    lefts = left.ask("learn 3").split()[1]
    rights = right.ask("learn 4").split()[1]
    assert len({own, lefts, rights}) == 3
    for asker, theirs in ((holder, lefts), (holder, rights), (left, rights), (left, own), (right, lefts)):
        assert asker.ask(f"check {theirs}") == "403"
    for asker in (holder, left, right):
        assert asker.ask("mine") == "200"
    shell(left.workspace, "echo left > /root/own && sync")
    for other in (parent, right.workspace):
        assert shell(other, "ls /root/own 2>/dev/null || echo none") == "none"
    identities = {shell(one, "cat /etc/machine-id; hostname") for one in (parent, left.workspace, right.workspace)}
    assert len(identities) == 3
    return left, right, lefts


def test_rewind_promote_and_handles(live: Live) -> None:
    parent = live.workspace("holder")
    holder = Holder(parent)
    holder.start()
    first = holder.ask("tell").split()[1]
    assert holder.ask("mine") == "200"
    parent.checkpoint("early")
    machine_id = shell(parent, "cat /etc/machine-id")
    rewinds(holder, first, machine_id)

    own = holder.ask("learn 2").split()[1]
    assert holder.ask("mine") == "200"
    assert holder.ask("line") == "HTTP/1.1 200", "a connection of its own generation works"
    left, _, lefts = forks(holder, own)

    # The branch's state becomes the parent's: its memory and files, not its identity.
    promoted = left.workspace.promote()
    assert (promoted.id, promoted.name) == (parent.id, "holder")
    assert promoted.report is not None
    assert (promoted.report.memory, promoted.report.disk) == ("kept", "rewound")
    assert promoted.report.kept_branch is not None
    assert holder.ask("tell").split() == ["3", lefts]
    assert holder.ask("mine") == "403", "a handle of the branch is not one of the workspace"
    assert shell(parent, "cat /root/own; hostname; cat /etc/machine-id").split() == ["left", "holder", machine_id]

    # And what it was can be had back, under a name and an identity of its own, or as itself.
    kept = Workspace.connect(promoted.report.kept_branch, client=live.client)
    assert Holder(kept).ask("tell").split() == ["2", own]
    assert Holder(kept).ask("mine") == "403"
    assert kept.promote().id == parent.id
    assert holder.ask("tell").split() == ["2", own]
    assert {"holder", "right"} <= {node.workspace.name for node in parent.tree()}
    for node in parent.tree()[1:]:
        Workspace.connect(node.workspace.id, wake=False, client=live.client).discard()
    assert [node.workspace.name for node in parent.tree()] == ["holder"]
    assert holder.ask("tell").split() == ["2", own]
