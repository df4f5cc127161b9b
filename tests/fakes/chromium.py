"""Debian's Chromium without a window, driven over the DevTools protocol: what a visitor of a shared port has."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

DEADLINE_S = 120
NAMES = ("chromium-headless-shell", "/usr/lib/chromium/chromium-headless-shell", "chromium", "google-chrome")


def executable() -> str | None:
    """The first of Chromium's names that there is."""
    return next((found for name in NAMES if (found := shutil.which(name)) is not None), None)


class Tab:
    """One page."""

    def __init__(self, browser: Chromium) -> None:
        self._browser = browser
        self.target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        browser.call("Page.enable", self._session)

    def open(self, url: str) -> None:
        """Go there; returns when all of it is loaded."""
        answer = self._browser.call("Page.navigate", self._session, url=url)
        assert "errorText" not in answer, answer
        self._browser.event("Page.loadEventFired", self._session)

    @property
    def title(self) -> str:
        return str(self._browser.call("Target.getTargetInfo", targetId=self.target)["targetInfo"]["title"])

    @property
    def url(self) -> str:
        return str(self._browser.call("Target.getTargetInfo", targetId=self.target)["targetInfo"]["url"])

    def run(self, script: str) -> Any:
        """The value of an expression, of its promise if it is one."""
        answer = self._browser.call("Runtime.evaluate", self._session, expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")


class Chromium:
    """A connection to a browser with a fresh profile."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        about = {} if session is None else {"sessionId": session}
        self._socket.send(json.dumps({"id": number, "method": method, "params": params, **about}))
        while (answer := json.loads(self._socket.recv(DEADLINE_S))).get("id") != number:
            self._events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def event(self, method: str, session: str) -> None:
        """Wait until something has happened."""
        while True:
            for one in self._events:
                if (one.get("method"), one.get("sessionId")) == (method, session):
                    self._events.remove(one)
                    return
            self._events.append(json.loads(self._socket.recv(DEADLINE_S)))

    def cookies(self) -> set[tuple[str, str]]:
        """Domain and name of all that the browser keeps."""
        return {(one["domain"], one["name"]) for one in self.call("Storage.getCookies")["cookies"]}


@contextmanager
def chromium(program: str, profile: Path) -> Iterator[Chromium]:
    """Runs while the block lasts."""
    command = [
        program,
        "--headless",
        f"--user-data-dir={profile}",
        "--remote-debugging-port=0",
        "--disable-gpu",
        "--no-first-run",
    ]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-extensions", "--no-proxy-server"]
    if os.geteuid() == 0:
        command.append("--no-sandbox")  # it refuses root otherwise; what is tested are its rules for origins, not its own walls
    process = subprocess.Popen([*command, "about:blank"], stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        url = next(line.split()[-1] for line in lines if line.startswith("DevTools listening on "))
        with connect(url, max_size=None, compression=None) as socket:
            yield Chromium(socket)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
