"""A hostile program's pages in a real browser: what they are kept from by the path form, and by an origin of their own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from perdure.sdk import Workspace
from tests.fakes.api_server import FakeServer
from tests.fakes.chromium import Chromium, Tab, chromium, executable
from tests.integration.api.programs import ported, server

__all__ = ["ported", "server"]
PROGRAM = executable()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(PROGRAM is None, reason="There is no Chromium here: apt-get install chromium-headless-shell."),
]

PAGE = b"""<!doctype html><title>untouched</title><script>
document.title = "ran";
localStorage.setItem("mark", location.host);
async function reach(url) {
  try { return (await fetch(url, {credentials: "include"})).status } catch (error) { return error.name }
}
</script>"""


class Hostile(BaseHTTPRequestHandler):
    """Its page runs what it can, and sets cookies as wide as they go."""

    protocol_version = "HTTP/1.1"
    paths: list[str]

    def do_GET(self) -> None:
        self.paths.append(self.path)
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(PAGE)))
        self.send_header("set-cookie", "own=1; Path=/")
        self.send_header("set-cookie", "wide=1; Domain=ws.localhost; Path=/")
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hostile(server: FakeServer) -> Iterator[tuple[int, list[str]]]:
    """A program in ``demo``: its port, and what it was asked for."""
    kind = type("OneHostile", (Hostile,), {"paths": []})
    web = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    web.daemon_threads = True
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    server.workspaces.world("demo").ports.add(web.server_port)
    try:
        yield web.server_port, kind.paths
    finally:
        web.shutdown()
        thread.join()
        web.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    assert PROGRAM is not None
    profile: Path = tmp_path_factory.mktemp("profile")
    with chromium(PROGRAM, profile) as made:
        yield made


def test_by_path_nothing_of_a_page_acts_for_the_apis_origin(server: FakeServer, demo: Workspace, browser: Chromium) -> None:
    with hostile(server) as (port, paths):
        link = demo.ports.share(port)
        tab = Tab(browser)
        tab.open(f"{server.url}/v1/workspaces/demo/ports/{port}/?perdure_share={link.token}")
        assert (tab.title, paths[0]) == ("untouched", "/"), "it was shown, and its script did not run"
        assert browser.cookies() == set()


def test_by_host_a_page_has_its_own_origin_and_no_other(server: FakeServer, demo: Workspace, browser: Chromium) -> None:
    with hostile(server) as (port, paths), hostile(server) as (other, others):
        tab = Tab(browser)
        tab.open(demo.ports.share(port).url)
        assert (tab.title, "perdure_share" in tab.url) == ("ran", False), "the token is out of the address bar"
        assert set(tab.run("document.cookie").split("; ")) == {"own=1", "wide=1"}, "what lets it in is not for its scripts"
        host = tab.run("location.host")
        kept = {name for domain, name in browser.cookies() if domain == host.partition(":")[0]}
        assert kept == {"own", "wide", "perdure-share"}
        assert {domain for domain, _ in browser.cookies()} == {host.partition(":")[0]}, "however wide it wanted them"
        api = json.dumps(f"{server.url}/v1/workspaces")
        assert tab.run(f"reach({api})") == "TypeError"
        assert tab.run("reach('/again')") == 200 and "/again" in paths

        sibling = Tab(browser)
        sibling.open(demo.ports.share(other).url)
        assert sibling.run("localStorage.getItem('mark')") == sibling.run("location.host") != host
        before = len(paths)
        assert sibling.run(f"reach('http://{host}/stolen')") == "TypeError"
        assert len(paths) == before, "the other program never heard of it"
        assert "/stolen" not in paths and others
        assert tab.run("localStorage.getItem('mark')") == host


def test_a_page_that_frames_the_api_or_another_port_sees_nothing_of_it(
    server: FakeServer, demo: Workspace, browser: Chromium
) -> None:
    with hostile(server) as (port, _), hostile(server) as (other, others):
        visited, tab = Tab(browser), Tab(browser)
        visited.open(demo.ports.share(other).url)  # the browser has that one's cookie now
        tab.open(demo.ports.share(port).url)
        sibling = visited.run("location.origin")
        before = len(others)
        script = """new Promise(done => {{
            const frame = document.createElement("iframe");
            frame.onload = () => {{ let seen; try {{ seen = frame.contentDocument && frame.contentDocument.title }}
                                    catch (error) {{ seen = error.name }} done(seen) }};
            frame.src = {url}; document.body.append(frame) }})"""
        for url in (f"{server.url}/v1/workspaces", f"{sibling}/framed"):
            assert tab.run(script.format(url=json.dumps(url))) in {None, "SecurityError"}, url
        assert len(others) == before, "a page of another port is no visitor, though the browser has a visitor's cookie"
