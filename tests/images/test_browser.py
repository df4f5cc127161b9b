"""The image ``browser``: Chromium in a workspace, logged in to a site, with a page open whose state is in its memory only.

The site runs in the workspace too. The test speaks to the browser as any program outside would: CDP over the workspace's port.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from perdure.sdk import Workspace
from tests.e2e.live import Live, attempt, shell, until
from tests.images.cdp import Page
from tests.images.hosts import Visitor, lose_host

SITE = "http://127.0.0.1:8000/"
#: Who is logged in is known by a cookie that it sets when the form is sent; the page counts clicks in a variable.
PROGRAM = r"""
import http.server, secrets, urllib.parse
sessions = {}
FORM = "<form method=post action=/login><input name=name><input name=word type=password><button>Log in</button></form>"
PAGE = ("<h1>Hello, %s</h1><button onclick='clicks += 1'>Click</button>"
        "<script>let clicks = 0; const opened = Math.random().toString();</script>")
class Site(http.server.BaseHTTPRequestHandler):
    def who(self):
        for part in (self.headers["cookie"] or "").split(";"):
            name, _, value = part.strip().partition("=")
            if name == "session":
                return sessions.get(value)
    def answer(self, body, status=200, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())
    def do_GET(self):
        who = self.who()
        if self.path == "/who":
            self.answer(who or "nobody")
        else:
            self.answer(PAGE % who if who else FORM)
    def do_POST(self):
        sent = urllib.parse.parse_qs(self.rfile.read(int(self.headers["content-length"])).decode())
        if self.path == "/login" and sent.get("word") == ["correct horse"]:
            token = secrets.token_hex()
            sessions[token] = sent["name"][0]
            self.answer("", 303, location="/", set_cookie=f"session={token}; HttpOnly; Max-Age=86400")
        else:
            self.answer(FORM, 403)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Site).serve_forever()
"""
FILL = """
document.forms[0].elements.name.value = "ada";
document.forms[0].elements.word.value = "correct horse";
document.forms[0].submit();
"""


@dataclass
class Seen:
    """What a page holds: who the site says it is, its clicks, and the number that it drew when it was opened."""

    who: str
    clicks: int
    opened: str


@dataclass
class Browser:
    workspace: Workspace
    visitor: Visitor
    pid: int

    def page(self, workspace: Workspace | None = None) -> Page:
        return Page(self.visitor, workspace or self.workspace, SITE)

    def see(self, workspace: Workspace | None = None) -> Seen:
        with self.page(workspace) as page:
            return Seen(page.run("fetch('/who').then(answer => answer.text())"), page.run("clicks"), page.run("opened"))

    def click(self, times: int, workspace: Workspace | None = None) -> None:
        with self.page(workspace) as page:
            for _ in range(times):
                page.run("document.querySelector('button').click()")


def browser_pid(workspace: Workspace) -> int:
    return int(shell(workspace, "cat /run/browser.pid"))


@pytest.fixture(scope="module")
def browser(live: Live, built: Callable[[str], str]) -> Browser:
    workspace = live.workspace("web", image=built("browser"))
    workspace.files.write("/root/site.py", PROGRAM.encode())
    shell(workspace, "setsid python3 /root/site.py > /root/site.log 2>&1 < /dev/null &")
    shell(workspace, "until (exec 3<>/dev/tcp/127.0.0.1/8000) 2> /dev/null; do sleep 0.5; done")
    shell(workspace, f"browser start {SITE}", run_limit_s=600)
    made = Browser(workspace, Visitor(live), browser_pid(workspace))
    with made.page() as page:
        page.until("document.forms.length == 1")
        page.run(FILL)
        # Its script stands behind the heading: a click that comes before counts nothing.
        page.until("document.querySelector('h1')?.textContent == 'Hello, ada' && document.readyState == 'complete'")
    return made


def test_a_page_is_open_and_logged_in(browser: Browser) -> None:
    browser.click(2)
    seen = browser.see()
    assert (seen.who, seen.clicks) == ("ada", 2)
    with browser.page() as page:
        picture = base64.b64decode(page.call("Page.captureScreenshot", format="png")["data"])
        page.run("document.body.style.background = 'rgb(200, 30, 30)'")
        coloured = base64.b64decode(page.call("Page.captureScreenshot", format="png")["data"])
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert coloured != picture, "what is on the page is drawn"
    with browser.page() as page, pytest.raises(AssertionError, match="nothing_of_that_name"):
        page.run("nothing_of_that_name")


def test_its_pages_run_in_a_sandbox_and_not_as_root(browser: Browser) -> None:
    line = (
        "for one in $(pgrep -u browser -f -- --type=renderer); do "
        "grep -E '^(Uid|Seccomp):' /proc/$one/status; echo Spaces: $(readlink /proc/$one/ns/user /proc/$one/ns/pid); done"
    )
    facts = dict(text.split(":", 1) for text in shell(browser.workspace, line).splitlines())
    user = shell(browser.workspace, "id -u browser")
    assert facts["Uid"].split() == [user] * 4 and user != "0"
    assert facts["Seccomp"].strip() == "2"
    assert facts["Spaces"].split() != shell(browser.workspace, "readlink /proc/self/ns/user /proc/self/ns/pid").split()


def test_a_page_goes_on_after_sleep(browser: Browser) -> None:
    browser.click(1)
    before = browser.see()
    browser.workspace.sleep()
    assert browser.workspace.refresh().state == "hibernated"
    assert browser.see() == before
    browser.click(1)
    assert browser.see() == Seen("ada", before.clicks + 1, before.opened)
    assert browser_pid(browser.workspace) == browser.pid


def test_a_fork_has_a_browser_of_its_own(browser: Browser) -> None:
    before = browser.see()
    (branch,) = browser.workspace.fork(1, names=["branch"])
    assert isinstance(branch, Workspace)
    assert browser.see(branch) == before
    browser.click(3, branch)
    with browser.page(branch) as page:
        page.call("Network.clearBrowserCookies")
    assert browser.see(branch) == Seen("nobody", before.clicks + 3, before.opened)
    assert browser.see() == before, "nothing of that reached the parent"
    branch.delete()


def test_a_lost_host_leaves_what_the_checkpoint_had(browser: Browser, live: Live) -> None:
    browser.click(1)
    kept = browser.see()
    browser.workspace.checkpoint()
    browser.click(5)
    with browser.page() as page:
        page.call("Network.clearBrowserCookies")
    lose_host(live, browser.workspace)
    until(lambda: browser.workspace.refresh().state == "hibernated")
    assert browser.see() == kept
    report = browser.workspace.resume_report()
    assert report is not None and report.memory == "kept"
    assert browser_pid(browser.workspace) == browser.pid


def test_the_profile_keeps_the_login_when_the_browser_is_started_anew(browser: Browser) -> None:
    before = browser.see()
    shell(browser.workspace, f"browser stop && browser start {SITE}", run_limit_s=600)
    with browser.page() as page:
        page.until("document.querySelector('h1') !== null")
    after = browser.see()
    assert (after.who, after.clicks) == ("ada", 0)
    assert after.opened != before.opened
    assert browser_pid(browser.workspace) != browser.pid


def test_a_second_start_opens_a_page_in_the_browser_that_runs(browser: Browser) -> None:
    pid = browser_pid(browser.workspace)
    shell(browser.workspace, f"browser start '{SITE}?q=a b&c=%20#end'", run_limit_s=600)
    pages = [one["url"] for one in browser.visitor.json(browser.workspace, 9222, "/json/list") if one["type"] == "page"]
    assert sorted(pages) == [SITE, f"{SITE}?q=a%20b&c=%20#end"]
    assert browser_pid(browser.workspace) == pid


def test_what_is_wrong_is_said(browser: Browser, live: Live) -> None:
    """Wrong words, a browser that cannot run, and too little memory for one: each in a sentence."""
    assert attempt(browser.workspace, "browser begin").stderr == "usage: browser start [URL...] | browser stop\n"
    refused = attempt(browser.workspace, "browser stop", user="browser")
    assert (refused.exit_code, "Run it as root" in refused.stderr) == (1, True)
    shell(browser.workspace, "browser stop && chmod -x /usr/lib/chromium/chromium-headless-shell", run_limit_s=600)
    failed = attempt(browser.workspace, "browser start")
    assert (failed.exit_code, "Chromium has ended" in failed.stderr, "ermission denied" in failed.stderr) == (1, True, True), (
        failed
    )
    error = live.run("create", "small", "--image", "browser", "--memory-mib", "512", "--json").error
    assert (error["code"], "512 MiB of memory are too little for the image 'browser'" in error["message"]) == (
        "invalid_request",
        True,
    )
    assert "1536" in error["hint"]
