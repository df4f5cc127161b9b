"""A page of a browser in a workspace, over the Chrome DevTools Protocol and the workspace's port."""

from __future__ import annotations

import itertools
import json
from typing import Any

from websockets.sync.client import ClientConnection

from perdure.sdk import Workspace
from tests.e2e.live import DEADLINE_S, until
from tests.images.hosts import Visitor

PORT = 9222


class Refused(AssertionError):
    """What the browser says against a call, or a script's exception."""


class Page:
    """One connection to one page; the page is there with or without it."""

    def __init__(self, visitor: Visitor, workspace: Workspace, url: str) -> None:
        """The first page whose address begins with ``url``."""
        targets = visitor.json(workspace, PORT, "/json/list")
        found = [one["id"] for one in targets if one["type"] == "page" and one["url"].startswith(url)]
        assert found, targets
        self._socket: ClientConnection = visitor.websocket(workspace, PORT, f"/devtools/page/{found[0]}")
        self._numbers = itertools.count(1)

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._socket.recv(DEADLINE_S))
            if answer.get("id") == number:
                break
        if "error" in answer:
            raise Refused(answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; of its promise, if it is one."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise Refused(done["exceptionDetails"])
        return done["result"].get("value")

    def until(self, script: str) -> None:
        """Ask until an expression is true, over navigations, which end what is asked in the middle of them."""

        def holds() -> bool:
            try:
                return bool(self.run(script))
            except Refused:
                return False

        until(holds)
