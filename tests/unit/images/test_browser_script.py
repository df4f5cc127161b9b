"""The command ``browser`` of the image ``browser``, with something else in Chromium's place."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from perdure.images.recipe import load_recipe

CHROMIUM = f"""#!{sys.executable}
import http.server, os, signal, sys
if os.environ.get("BREAKS"):
    sys.exit("this cannot run")
port = int(next(word for word in sys.argv if word.startswith("--remote-debugging-port=")).partition("=")[2])
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_PUT(self):
        print("opens", self.path, flush=True)
        self.do_GET()
def ends(*_):
    print("ends in order", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, ends)
print(*sys.argv[1:], "home", os.environ["HOME"], flush=True)
http.server.HTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""
STUBS = {
    "chromium": CHROMIUM,
    "id": "#!/bin/sh\necho ${WHO-0}\n",
    "jq": "#!/bin/sh\necho encoded\n",
    "setpriv": '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n',
}


@dataclass
class Script:
    """The shipped script, moved to a directory and a port of the test's own."""

    path: Path
    place: Path

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        names = {"PATH": f"{self.place}:{os.environ['PATH']}", **environment}
        return subprocess.run(["sh", str(self.path), *words], env=names, capture_output=True, text=True, timeout=60, check=False)

    @property
    def log(self) -> str:
        return (self.place / "log").read_text()

    @property
    def pid(self) -> int:
        return int((self.place / "pid").read_text())


@pytest.fixture
def script(tmp_path: Path) -> Script:
    (content,) = (file.content for file in load_recipe("browser").files if file.path == "/usr/local/bin/browser")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    text = content.decode()
    for name, here in (
        ("/usr/lib/chromium/chromium-headless-shell", "chromium"),
        ("/var/lib/browser", str(tmp_path)),
        ("/var/log/browser.log", str(tmp_path / "log")),
        ("/run/browser.pid", str(tmp_path / "pid")),
        ("9222", str(port)),
    ):
        assert name in text
        text = text.replace(name, here)
    for name, stub in STUBS.items():
        (tmp_path / name).write_text(stub)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "SingletonLock").symlink_to("workspace-17")  # what a machine that was lost leaves
    (tmp_path / "browser").write_text(text)
    return Script(tmp_path / "browser", tmp_path)


def test_it_starts_answers_opens_pages_and_ends_in_order(script: Script) -> None:
    started = script.run("start", "http://one", "http://two")
    assert (started.returncode, started.stdout, started.stderr) == (0, "", "")
    pid = script.pid
    try:
        assert script.log.splitlines()[0].endswith(f"http://one http://two home {script.place}")
        assert not (script.place / "profile" / "SingletonLock").is_symlink()
        assert script.run("start", "http://three").returncode == 0
        assert script.pid == pid, "the one that runs is used"
        assert "opens /json/new?encoded" in script.log
    finally:
        stopped = script.run("stop")
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert script.log.endswith("ends in order\n")
    assert script.run("stop").returncode == 0, "there is nothing to stop"


def test_a_browser_that_ends_at_once_says_why(script: Script) -> None:
    failed = script.run("start", BREAKS="1")
    assert failed.returncode == 1
    assert "Chromium has ended" in failed.stderr
    assert "this cannot run" in failed.stderr


@pytest.mark.parametrize("words", [(), ("begin",)])
def test_other_words_are_told_the_usage(script: Script, words: tuple[str, ...]) -> None:
    told = script.run(*words)
    assert (told.returncode, told.stderr) == (2, "usage: browser start [URL...] | browser stop\n")


def test_who_is_not_root_is_told(script: Script) -> None:
    told = script.run("start", WHO="1000")
    assert told.returncode == 1
    assert "Run it as root" in told.stderr
    assert not (script.place / "pid").exists()
