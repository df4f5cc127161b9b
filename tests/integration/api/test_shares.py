"""Who may reach a port: keys, links and everybody; by SDK and command line, over real HTTP."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import httpx2
import pytest

from perdure.core.config import Settings
from perdure.core.errors import Conflict, InvalidRequest, NotFound
from perdure.sdk import AsyncClient, AsyncWorkspace, Client, Workspace, _core
from tests.fakes.api_server import FakeServer
from tests.fakes.workspaces import KEY
from tests.integration.api.programs import BEARER, DEADLINE_S, Echo, by_path, host_of, http, port, ported, server
from tests.integration.api.test_cli import Run, perdure

__all__ = ["http", "perdure", "port", "ported", "server"]


def test_by_host_with_a_link_as_a_browser_does(server: FakeServer, demo: Workspace, port: int) -> None:
    link = demo.ports.share(port, expires_s=60)
    assert link.url == f"http://{host_of(server, port)}/?perdure_share={link.token}" and link.expires_at is not None
    with httpx2.Client(base_url=server.url, headers={"host": host_of(server, port), "accept": "text/html"}) as browser:
        first = browser.get(f"/page?perdure_share={link.token}&x=1")
        assert (first.status_code, first.headers["location"]) == (303, f"http://{host_of(server, port)}/page?x=1")
        cookie = first.headers["set-cookie"].partition(";")[0]
        page = browser.get("/page?x=1", headers={"cookie": f"{cookie}; own=2"})
        names = {name.lower(): value for name, value in page.json()["headers"]}
        assert names["cookie"] == "own=2" and names["host"] == host_of(server, port)
        assert page.headers["set-cookie"] == "a=1" and "content-security-policy" not in page.headers
        demo.ports.unshare(port)
        assert browser.get("/", headers={"cookie": cookie}).headers["perdure-reason"] == "share_revoked"


def test_by_path_with_a_link(http: httpx2.Client, demo: Workspace, port: int) -> None:
    link = demo.ports.share(port)
    for ref in ("demo", demo.id):
        path = f"/v1/workspaces/{ref}/ports/{port}/"
        assert http.get(f"{path}?perdure_share={link.token}").json()["line"] == "GET / HTTP/1.1"
        answer = http.get(path, headers={"perdure-share": link.token or ""})
        assert answer.status_code == 200 and "perdure-generation" not in answer.headers
    for path in (
        "/v1/workspaces",
        "/v1/workspaces/demo",
        f"/v1/workspaces/demo/ports/{port}",
        f"/v1/workspaces/demo/ports/{port + 1}/",
    ):
        found = http.get(f"{path}?perdure_share={link.token}", headers={"perdure-share": link.token or ""})
        assert found.status_code in {401, 403}, path


def test_the_apis_own_checks_stay_as_strict(server: FakeServer, http: httpx2.Client, port: int) -> None:
    for headers, status in (
        ({}, 401),
        ({"authorization": "Bearer pdk_wrong"}, 401),
        ({**BEARER, "origin": "https://evil.example"}, 403),
        ({**BEARER, "origin": f"http://{host_of(server, port)}"}, 403),
        ({**BEARER, "host": "evil.example"}, 403),
    ):
        assert http.get(by_path(port), headers=headers).status_code == status
        assert http.get("/v1/workspaces", headers=headers).status_code == status
    assert not Echo.connections
    reached = http.get("/v1/workspaces", headers={**BEARER, "host": host_of(server, port)})
    assert reached.json()["line"] == "GET /v1/workspaces HTTP/1.1", "on a program's host the API's paths are the program's"


def test_shares_of_a_workspace(server: FakeServer, demo: Workspace, http: httpx2.Client, port: int) -> None:
    assert demo.ports.shares() == []
    link = demo.ports.share(port, expires_s=60)
    opened = demo.ports.share(8080, is_public=True)
    assert opened.token is None and opened.url == f"http://{host_of(server, 8080)}/"
    found = {one.port: one for one in demo.ports.shares()}
    assert set(found) == {port, 8080} and found[8080].public and not found[port].public
    assert found[port].links_until == link.expires_at and found[port].shared_by == "local"
    assert link.token is not None and link.token not in found[port].model_dump_json()
    info = demo.ports.get(port)
    assert info.share == found[port] and info.path == f"/v1/workspaces/{demo.id}/ports/{port}/"
    assert demo.ports.url(8081) == f"http://{host_of(server, 8081)}/" and demo.ports.get(8081).share is None
    assert demo.get_host(8081) == host_of(server, 8081)
    server.workspaces.world("demo").ports.discard(8080)
    assert http.get("/", headers={"host": host_of(server, 8080)}).headers["perdure-reason"] == "port_refused", "it was let in"
    demo.ports.unshare(8080)
    assert http.get("/", headers={"host": host_of(server, 8080)}).status_code == 401
    with pytest.raises(NotFound, match="is not shared"):
        demo.ports.unshare(8080)


def test_links_one_by_one(
    server: FakeServer, demo: Workspace, http: httpx2.Client, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [demo.ports.share(port), demo.ports.share(8080), demo.ports.share(port)]
    monkeypatch.setattr(_core, "PAGE", 2)
    assert [one.id for one in demo.ports.links()] == [one.link_id for one in made]
    assert [(one.id, one.expires_at, one.made_by) for one in demo.ports.links(8080)] == [
        (made[1].link_id, made[1].expires_at, "local")
    ]
    first, _, last = made
    assert first.link_id is not None and first.token is not None and last.token is not None
    assert first.token not in "".join(one.model_dump_json() for one in demo.ports.links())
    demo.ports.revoke_link(first.link_id)
    refused = http.get(by_path(port), headers={"perdure-share": first.token})
    assert (refused.status_code, refused.headers["perdure-reason"]) == (401, "share_revoked")
    assert http.get(by_path(port), headers={"perdure-share": last.token}).status_code == 200
    for link_id in (first.link_id, "lnk_absent", "%2e"):
        with pytest.raises(NotFound, match="that counts"):
            demo.ports.revoke_link(link_id)
    (branch,) = demo.fork(names=["branch"])
    assert isinstance(branch, Workspace)
    with pytest.raises(NotFound):
        branch.ports.revoke_link(str(last.link_id))
    assert demo.ports.share(8081, is_public=True).link_id is None
    demo.ports.unshare(port)
    assert [one.id for one in demo.ports.links()] == [made[1].link_id]
    for number in (0, 65536):
        with pytest.raises(InvalidRequest):
            demo.ports.links(number)
        assert http.get("/v1/workspaces/demo/links", params={"port": number}, headers=BEARER).status_code == 422


def test_shares_that_make_no_sense(demo: Workspace, http: httpx2.Client) -> None:
    for number in (0, 65536, -1):
        with pytest.raises(InvalidRequest):
            demo.ports.share(number)
        assert http.get(f"/v1/workspaces/demo/ports/{number}", headers=BEARER).status_code == 422
        assert http.delete(f"/v1/workspaces/demo/shares/{number}", headers=BEARER).status_code == 422
    for seconds in (0, -1, 1e12, float("nan")):
        with pytest.raises(InvalidRequest):
            demo.ports.share(80, expires_s=seconds)
    assert http.post("/v1/workspaces/absent/shares", headers=BEARER, json={"port": 80}).status_code == 404
    assert demo.ports.shares() == []


def test_a_fork_shares_nothing(demo: Workspace, http: httpx2.Client, server: FakeServer, port: int) -> None:
    link = demo.ports.share(port)
    (branch,) = demo.fork(names=["branch"])
    assert isinstance(branch, Workspace) and branch.ports.shares() == []
    found = http.get(f"/?perdure_share={link.token}", headers={"host": host_of(server, port, "branch")})
    assert (found.status_code, found.headers["perdure-reason"]) == (403, "share_elsewhere")


async def test_the_same_in_async_code(server: FakeServer, demo: Workspace, port: int) -> None:
    async with AsyncClient(settings=server.settings) as client:
        ws = await AsyncWorkspace.connect("demo", client=client)
        link = await ws.ports.share(port)
        assert await ws.get_host(port) == host_of(server, port)
        async with httpx2.AsyncClient() as http:
            answer = await http.get(f"{server.url}{by_path(port)}", params={"perdure_share": link.token})
        assert answer.status_code == 200
        await ws.ports.unshare(port)


def test_without_a_domain_ports_are_below_the_api() -> None:
    home = Path(tempfile.mkdtemp(prefix="perdure-", dir="/tmp"))
    try:
        with FakeServer(Settings(home=home, listen_port=0, url=None, api_key=None)) as server:
            for client in (Client(settings=server.settings), Client(url=server.url, api_key=KEY)):
                with client:
                    ws = Workspace.create("demo", client=client, exist_ok=True)
                    assert ws.ports.url(80) == f"{server.url}/v1/workspaces/{ws.id}/ports/80/"
                    assert ws.ports.share(80).url.startswith(f"{ws.ports.url(80)}?perdure_share=pds_")
                    with pytest.raises(Conflict, match="no domain for ports"):
                        ws.get_host(80)
                    with pytest.raises(Conflict, match="no domain for ports"):
                        ws.ports.share(80, is_public=True)
            found = httpx2.get(server.url, headers={"host": "demo--80.ws.localhost"})
            assert found.status_code == 403, "the guard knows no such host"
    finally:
        shutil.rmtree(home)


def test_a_domain_that_is_none_is_told() -> None:
    home = Path(tempfile.mkdtemp(prefix="perdure-", dir="/tmp"))
    server = FakeServer(Settings(home=home, listen_port=0, url=None, api_key=None, ingress_domain="not a domain"))
    try:
        with pytest.raises(InvalidRequest, match="is not a domain for ports"):
            server.__enter__()
    finally:
        server._loop.call_soon_threadsafe(server._loop.stop)
        server._thread.join(DEADLINE_S)
        server._loop.close()
        shutil.rmtree(home)


# --------------------------------------------------------------------------------------------------------------- command line


def test_the_command_line_shares(perdure: Run, demo: Workspace, server: FakeServer, http: httpx2.Client, port: int) -> None:
    assert perdure("share demo").out == "No port is shared. Share one with 'perdure share NAME PORT'.\n"
    made = perdure(f"share demo {port} --expires 30min")
    url = made.out.strip()
    assert url.startswith(f"http://{host_of(server, port)}/?perdure_share=pds_")
    (link,) = demo.ports.links(port)
    assert made.err.startswith(f"Whoever has this link ({link.id}) may go in until 20") and made.err.endswith(" UTC.\n")
    token = url.partition("=")[2]
    assert http.get(by_path(port), headers={"perdure-share": token}).status_code == 200
    opened = perdure(f"share demo {port} --public")
    assert opened.out == f"http://{host_of(server, port)}/\n" and f"until 'perdure unshare demo {port}'" in opened.err
    header, row = perdure("share demo").out.splitlines()
    assert header.split()[:2] == ["PORT", "WHO"] and row.split()[:2] == [str(port), "everybody"] and "local" in row
    assert perdure("share demo --json").json["shares"][0]["port"] == port
    assert perdure(f"unshare demo {port}").out == f"Port {port} of demo is private again\n"
    assert http.get(by_path(port), headers={"perdure-share": token}).headers["perdure-reason"] == "share_revoked"
    assert perdure("share demo --links").out == "No link counts. Make one with 'perdure share NAME PORT'.\n"
    made_json = perdure(f"share demo {port} --json").json
    header, row = perdure(f"share demo {port} --links").out.splitlines()
    assert header.split()[:2] == ["LINK", "PORT"] and row.split()[:2] == [made_json["link_id"], str(port)]
    taken_back = made_json["link_id"]
    perdure(f"share demo {port}")
    assert len(perdure("share demo --links --json").json["links"]) == 2
    assert perdure(f"unshare demo --link {taken_back}").out == f"The link {taken_back} of demo counts no more\n"
    again = perdure(f"unshare demo --link {taken_back} --json")
    assert (again.code, again.error["code"]) == (1, "not_found")
    made_json = perdure(f"share demo {port} --json").json
    assert made_json["token"] in made_json["url"] and not made_json["share"]["public"]
    assert perdure(f"unshare demo {port} --json").json == {"workspace": demo.id, "port": port}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("share demo --expires 1h", "--expires is for a link."),
        ("share demo 80 --public --expires 1h", "--expires is for a link."),
        ("share demo --public", "Which port is to be public?"),
        ("share demo 80 --expires soon", "'soon' is not a duration."),
        ("share demo 0", "0 is not a TCP port."),
        ("share absent 80", "There is no workspace 'absent'."),
        ("unshare demo 80", "is not shared."),
        ("unshare demo", "a port or one link?"),
        ("unshare demo 80 --link lnk_1", "a port or one link?"),
        ("unshare demo --link lnk_1", "There is no link 'lnk_1'"),
        ("share demo --links --public", "--links lists what there is."),
        ("share demo 80 --links --expires 1h", "--links lists what there is."),
    ],
)
def test_mistakes_on_the_command_line(perdure: Run, demo: Workspace, line: str, message: str) -> None:
    answer = perdure(f"{line} --json")
    assert answer.code == 1 and message in answer.error["message"] and answer.error["hint"]
