"""The host form, and who may in by either: keys, share links, cookies, public ports."""

from __future__ import annotations

from typing import Any

from perdure.access.model import LOCAL, VISITOR
from perdure.api.guard import CALLER, Caller
from perdure.api.ingress.front import HostForm
from perdure.api.ingress.names import Domain
from perdure.core.ids import RequestId
from tests.fakes.ingress import CTX, HEAD, Asking, Stage, the_api, unlimited


def host_call(stage: Stage, path: str = "/", host: str = "demo--80.ws.localhost:7070", **headers: str) -> Asking:
    caller = Asking(stage, path, headers={"host": host, **{name.replace("_", "-"): value for name, value in headers.items()}})
    caller.start(HostForm(the_api, stage.services, unlimited(), Domain.parse("ws.localhost"), stage.underway))
    return caller


async def answered(stage: Stage, caller: Asking) -> list[bytes]:
    """The program's side of a request that is let in."""
    peer = await stage.peer()
    head = await peer.head()
    await peer.send(HEAD + b"content-length: 2\r\nset-cookie: a=1; Domain=ws.localhost\r\nconnection: close\r\n\r\nok")
    await caller.ended()
    assert caller.status == 200, caller.sent
    return head


async def link(stage: Stage, port: int = 80, **options: Any) -> str:
    return (await stage.services.shares.share(LOCAL, "demo", port, expires_s=3600, **options)).token


async def test_a_port_is_private_andthe_api_learns_what_exists(stage: Stage) -> None:
    answers = []
    for host in ("demo--80", "demo--81", "absent--80", "ws-" + "0" * 26 + "--80"):
        caller = host_call(stage, host=f"{host}.ws.localhost")
        await caller.ended()
        answers.append(
            (caller.status, caller.body, [pair for pair in caller.sent[0]["headers"] if pair[0] != b"perdure-request-id"])
        )
    assert answers[0][0] == 401 and all(answer == answers[0] for answer in answers)
    assert stage.peers.empty()


async def test_a_person_gets_a_page_and_a_program_json(stage: Stage) -> None:
    caller = host_call(stage, accept="text/html,*/*")
    await caller.ended()
    assert (
        caller.headers["content-type"].startswith("text/html")
        and "default-src 'none'" in caller.headers["content-security-policy"]
    )
    assert b"share link" in caller.body
    caller = host_call(stage)
    await caller.ended()
    assert caller.error["code"] == "unauthenticated" and "Authorization: Bearer" in caller.error["hint"]


async def test_a_link_is_exchanged_for_a_cookie_on_the_first_visit(stage: Stage) -> None:
    token = await link(stage)
    caller = host_call(stage, f"/a//b?x=%20&perdure_share={token}&y", accept="text/html")
    await caller.ended()
    assert caller.status == 303 and stage.peers.empty()
    assert caller.headers["location"] == "http://demo--80.ws.localhost:7070/a//b?x=%20&y"
    assert caller.headers["referrer-policy"] == "no-referrer" and caller.headers["cache-control"] == "no-store"
    cookie, *attributes = caller.headers["set-cookie"].split("; ")
    assert cookie == f"perdure-share={token}" and attributes == ["Path=/", "HttpOnly", "SameSite=Lax"]
    again = host_call(stage, "/a//b?x=%20&y", cookie=f"{cookie}; own=1", accept="text/html")
    head = await answered(stage, again)
    assert head[0] == b"GET /a//b?x=%20&y HTTP/1.1" and b"cookie: own=1" in head
    assert b"host: demo--80.ws.localhost:7070" in head
    assert token.encode() not in b"".join(head)
    assert again.headers["set-cookie"] == "a=1", "and no other host gets it"
    assert "perdure-generation" not in again.headers and "content-security-policy" not in again.headers


async def test_a_link_never_leads_to_another_host(stage: Stage) -> None:
    token = await link(stage)
    caller = host_call(stage, f"//evil.example/?perdure_share={token}", accept="text/html")
    await caller.ended()
    assert caller.headers["location"] == "http://demo--80.ws.localhost:7070//evil.example/"


async def test_a_target_that_is_no_path_is_refused(stage: Stage) -> None:
    token = await link(stage)
    for target in ("@evil.example/", "*", "evil"):
        caller = host_call(stage, f"{target}?perdure_share={token}", accept="text/html")
        await caller.ended()
        assert caller.status == 422 and stage.peers.empty()


async def test_with_tls_before_it_no_other_host_can_plant_the_cookie(stage: Stage) -> None:
    token = await link(stage)
    app = HostForm(the_api, stage.services, unlimited(), Domain.parse("https://ws.example.com"), stage.underway)
    headers = {"host": "demo--80.ws.example.com", "accept": "text/html"}
    caller = Asking(stage, f"/?perdure_share={token}", headers=headers)
    caller.start(app)
    await caller.ended()
    assert caller.headers["set-cookie"] == f"__Host-perdure-share={token}; Path=/; HttpOnly; SameSite=Lax; Secure"
    assert caller.headers["location"] == "https://demo--80.ws.example.com/"
    planted = f"__Host-perdure-share=planted; __Host-perdure-share={token}"
    caller = Asking(stage, "/", headers={"host": "demo--80.ws.example.com", "cookie": planted})
    caller.start(app)
    assert b"x-forwarded-proto: https" in await answered(stage, caller)


async def test_programs_show_the_token_in_the_query_or_in_a_header(stage: Stage) -> None:
    token = await link(stage)
    head = await answered(stage, host_call(stage, f"/x?perdure_share={token}"))
    assert head[0] == b"GET /x HTTP/1.1"
    head = await answered(stage, host_call(stage, perdure_share=token))
    assert not any(b"perdure" in line.lower() for line in head)
    caller = Asking(
        stage, f"/?perdure_share={token}", method="POST", headers={"host": "demo--80.ws.localhost", "accept": "text/html"}
    )
    caller.start(HostForm(the_api, stage.services, unlimited(), Domain.parse("ws.localhost"), stage.underway))
    await answered(stage, caller)


async def test_the_path_form_takes_a_token_too(stage: Stage) -> None:
    token = await link(stage)
    for path, headers in ((f"/?perdure_share={token}&a=1", {}), ("/?a=1", {"perdure-share": token})):
        caller = Asking(stage, "/v1/workspaces/demo/ports/80" + path, headers=headers)
        caller.scope[CALLER] = Caller(VISITOR, RequestId("req_1"))
        caller.start()
        assert (await answered(stage, caller))[0] == b"GET /?a=1 HTTP/1.1"
        assert "perdure-generation" not in caller.headers and caller.headers["content-security-policy"] == "sandbox"
    caller = Asking(stage, "/v1/workspaces/demo/ports/80/")
    caller.scope[CALLER] = Caller(VISITOR, RequestId("req_1"))
    caller.start()
    await caller.ended()
    assert caller.status == 401


async def test_tokens_that_do_not_count(stage: Stage) -> None:
    good, other = await link(stage), await link(stage, 81)
    expired = (await stage.services.shares.share(LOCAL, "demo", 80, expires_s=-60)).token

    async def refused(token: str, host: str = "demo--80") -> tuple[int, str]:
        caller = host_call(stage, f"/?perdure_share={token}", f"{host}.ws.localhost")
        await caller.ended()
        return caller.status, caller.error["code"]

    assert await refused("pds_forged") == (401, "unauthenticated")
    assert await refused("") == (401, "unauthenticated")
    assert await refused(good[:-2] + ("AA" if good[-2:] != "AA" else "BB")) == (401, "unauthenticated")
    assert await refused(other) == (403, "share_elsewhere")
    assert await refused(good, "absent--80") == await refused(good, "demo--81") == (403, "share_elsewhere")
    assert await refused(expired) == (401, "share_expired")
    await stage.services.shares.unshare(LOCAL, "demo", 80)
    assert await refused(good) == (401, "share_revoked")
    renewed = await link(stage)
    assert await refused(good) == (401, "share_revoked"), "a later share does not bring earlier links back"
    await answered(stage, host_call(stage, f"/?perdure_share={renewed}"))
    await stage.workspaces.delete(CTX, "demo")
    assert await refused(renewed) == (403, "share_elsewhere")
    assert await refused(renewed, "ws-" + "0" * 25 + "1--80") == (401, "share_revoked")
    assert stage.peers.empty()


async def test_another_sites_page_cannot_use_a_visitors_cookie(stage: Stage) -> None:
    """Workspaces of one domain are one site to a browser, so it would add the cookie."""
    cookie = f"perdure-share={await link(stage)}"
    for headers in (
        {"origin": "http://evil--80.ws.localhost:7070"},
        {"origin": "null"},
        {"sec_fetch_site": "same-site", "sec_fetch_mode": "no-cors"},
    ):
        caller = host_call(stage, cookie=cookie, **headers)
        await caller.ended()
        assert (caller.status, caller.error["code"]) == (403, "forbidden")
    await answered(stage, host_call(stage, cookie=cookie, origin="http://demo--80.ws.localhost:7070"))
    navigation = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    await answered(stage, host_call(stage, cookie=cookie, **navigation))


async def test_a_public_port_is_open_until_it_is_unshared(stage: Stage) -> None:
    await stage.services.shares.publish(LOCAL, "demo", 80)
    await answered(stage, host_call(stage))
    await answered(stage, host_call(stage, host="ws-" + "0" * 25 + "1--80.ws.localhost", accept="text/html"))
    await answered(stage, host_call(stage, "/?perdure_share=stale", accept="text/html"))
    caller = host_call(stage, host="demo--81.ws.localhost")
    await caller.ended()
    assert caller.status == 401
    await stage.services.shares.unshare(LOCAL, "demo", 80)
    caller = host_call(stage)
    await caller.ended()
    assert caller.status == 401


async def test_an_api_key_opens_the_host_form_and_stays_here(stage: Stage) -> None:
    caller = host_call(stage, authorization="Bearer pdk_test-key")
    head = await answered(stage, caller)
    assert not any(b"pdk_" in line for line in head)
    assert caller.headers["perdure-generation"] == "1"
    caller = host_call(stage, authorization="Bearer pdk_wrong")
    await caller.ended()
    assert (caller.status, caller.error["code"]) == (401, "unauthenticated")
    token = await link(stage)
    head = await answered(stage, host_call(stage, perdure_share=token, authorization="Bearer of-the-app"))
    assert b"authorization: Bearer of-the-app" in head, "what is not ours is the program's"


async def test_hosts_that_name_nothing_and_those_of_the_api(stage: Stage) -> None:
    for host in ("demo.ws.localhost", "a.demo--80.ws.localhost", "demo--0.ws.localhost"):
        caller = host_call(stage, host=host)
        await caller.ended()
        assert caller.status == 404, "never the API"
    for host in ("127.0.0.1:7070", "localhost", "ws.localhost", "demo--80.ws.localhost.example"):
        caller = host_call(stage, host=host)
        await caller.ended()
        assert caller.status == 299


async def test_the_apis_paths_are_the_programs_on_its_own_host(stage: Stage) -> None:
    await stage.services.shares.publish(LOCAL, "demo", 80)
    for path in ("/v1/workspaces", "/v1/workspaces/demo/ports/81/", "http://other.example/x"):
        head = await answered(stage, host_call(stage, path))
        assert head[0] == f"GET {'/x' if path.startswith('http') else path} HTTP/1.1".encode()
