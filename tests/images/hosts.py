"""A host that is lost, and a visitor who comes to a workspace's ports from outside."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from typing import Any

import httpx2
from websockets.sync.client import ClientConnection, connect

from perdure.sdk import Workspace
from tests.e2e.live import DEADLINE_S, Live, machine_of


def lose_host(live: Live, *workspaces: Workspace) -> None:
    """SIGKILL of the server and of these workspaces' machines, and a new server over what they left."""
    victims = [os.pidfd_open(pid) for pid in (live.pid(), *(machine_of(live, one) for one in workspaces))]
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):  # a machine may have ended with its server
            signal.pidfd_send_signal(victim, signal.SIGKILL)
    for victim in victims:
        has_ended, _, _ = select.select([victim], [], [], DEADLINE_S)
        os.close(victim)
        assert has_ended, "it does not die of SIGKILL"
    live.ok("up", "--detach")


class Visitor:
    """Asks by HTTP with a key, at the address that the server tells at that moment."""

    def __init__(self, live: Live) -> None:
        self.bearer = {"authorization": f"Bearer {(live.home / 'run' / 'api.key').read_text().strip()}"}

    def ask(self, workspace: Workspace, port: int, path: str) -> httpx2.Response:
        """GET; any answer but 200 fails."""
        url = workspace.ports.url(port).removesuffix("/") + path
        answer = httpx2.get(url, headers=self.bearer, timeout=DEADLINE_S)
        assert answer.status_code == 200, (url, answer.status_code, answer.text)
        return answer

    def json(self, workspace: Workspace, port: int, path: str) -> Any:
        return self.ask(workspace, port, path).json()

    def websocket(self, workspace: Workspace, port: int, path: str) -> ClientConnection:
        url = workspace.ports.url(port).replace("http", "ws", 1).removesuffix("/") + path
        options: dict[str, Any] = {"open_timeout": DEADLINE_S, "ping_interval": None, "proxy": None, "max_size": 16 << 20}
        return connect(url, additional_headers=self.bearer, **options)
