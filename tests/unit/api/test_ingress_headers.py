"""What passes to a program and what comes back, header by header."""

from __future__ import annotations

import pytest

from perdure.api.ingress import headers
from perdure.api.ingress.headers import SANDBOX, Form, Way
from perdure.wire.node import Headers

HOST = Way(Form.HOST, 8080, "demo--8080.ws.localhost:7070", "https", "192.0.2.7")
PATH = Way(Form.PATH, 8080, "127.0.0.1:7070", "http", None, "/v1/workspaces/demo/ports/8080")
BOTH = pytest.mark.parametrize("way", [HOST, PATH], ids=lambda way: way.form)


def entered(way: Way, *pairs: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """What of these headers reaches the program, beside what is always said."""
    said = set(headers.to_program((), way))
    return [pair for pair in headers.to_program(pairs, way) if pair not in said]


def left(way: Way, *pairs: tuple[bytes, bytes], status: int = 200) -> list[tuple[bytes, bytes]]:
    return [pair for pair in headers.from_program(pairs, status, way) if pair not in SANDBOX]


def test_what_a_program_is_told_of_the_way() -> None:
    assert headers.to_program((), HOST) == (
        (b"host", b"demo--8080.ws.localhost:7070"),
        (b"x-forwarded-host", b"demo--8080.ws.localhost:7070"),
        (b"x-forwarded-proto", b"https"),
        (b"x-forwarded-for", b"192.0.2.7"),
    )
    assert headers.to_program((), PATH) == (
        (b"host", b"localhost:8080"),
        (b"x-forwarded-host", b"127.0.0.1:7070"),
        (b"x-forwarded-proto", b"http"),
        (b"x-forwarded-prefix", b"/v1/workspaces/demo/ports/8080"),
    )


@BOTH
def test_ordinary_headers_pass_in_order_and_twice(way: Way) -> None:
    pairs = (
        (b"accept", b"*/*"),
        (b"X-Two", b"1"),
        (b"x-two", b"2"),
        (b"range", b"bytes=0-"),
        (b"x_under", b"\xff"),
        (b"x-empty", b""),
    )
    assert entered(way, *pairs) == list(pairs)


@BOTH
@pytest.mark.parametrize(
    "name",
    b"Connection Keep-Alive Proxy-Connection Proxy-Authorization TE Trailer Transfer-Encoding Upgrade Content-Length Expect "
    b"Host Forwarded Via X-Real-IP X-Forwarded-For X-Forwarded-Host X-Forwarded-Whatever Perdure-Share Perdure-Anything "
    b"X_Forwarded_For x_real_ip Content_Length Transfer_Encoding Perdure_Share".split(),
)
def test_what_never_passes(name: bytes, way: Way) -> None:
    assert entered(way, (name, b"5")) == []


@BOTH
def test_what_connection_names_does_not_pass(way: Way) -> None:
    pairs = ((b"connection", b"close, X-One"), (b"Connection", b"x-two"), (b"x-one", b"1"), (b"X-Two", b"2"), (b"x-three", b"3"))
    assert entered(way, *pairs) == [(b"x-three", b"3")]


@BOTH
@pytest.mark.parametrize("value", [b"Bearer pdk_abc", b"bearer   pdk_abc", b"BEARER pdk_", b" Bearer pdk_x "])
def test_a_key_of_ours_never_passes(value: bytes, way: Way) -> None:
    assert entered(way, (b"Authorization", value)) == []


@BOTH
@pytest.mark.parametrize("value", [b"Basic cGRrXzp4", b"Bearer eyJhbGciOi", b"AWS4-HMAC-SHA256 Credential=x", b""])
def test_a_programs_own_authorization_passes(value: bytes, way: Way) -> None:
    assert entered(way, (b"Authorization", value)) == [(b"Authorization", value)]


def test_cookies_origin_and_referer_are_of_an_origin() -> None:
    pairs = ((b"cookie", b"a=1"), (b"origin", b"http://x"), (b"referer", b"http://x/?perdure_share=t"))
    assert entered(PATH, *pairs) == []
    assert entered(HOST, *pairs) == list(pairs)


@pytest.mark.parametrize(
    ("sent", "passed"),
    [
        (b"a=1; perdure-share=t; b=2", [b"a=1; b=2"]),
        (b"__Host-perdure-share=t;a=1", [b"a=1"]),
        (b"perdure-share=t", []),
        (b"perdure-share=t; __Host-perdure-share=u", []),
        (b"perdure-shared=t", [b"perdure-shared=t"]),
    ],
)
def test_our_cookies_stay_here(sent: bytes, passed: list[bytes]) -> None:
    assert [value for _, value in entered(HOST, (b"Cookie", sent))] == passed
    found = headers.shares_in_cookies(((b"cookie", sent),), "perdure-share")
    assert found == (["t"] if b" perdure-share=" in b" " + sent.replace(b";", b"; ") else [])


def test_every_cookie_of_our_name_is_looked_at() -> None:
    came: Headers = ((b"cookie", b"perdure-share=planted; perdure-share=good"), (b"cookie", b"perdure-share=third"))
    assert headers.shares_in_cookies(came, "perdure-share") == ["planted", "good", "third"]


# ------------------------------------------------------------------------------------------------------------------ answers


@BOTH
def test_of_an_answer_the_connections_affairs_stay_here(way: Way) -> None:
    dropped = b"connection keep-alive transfer-encoding trailer upgrade proxy-authenticate alt-svc date x-request-id perdure-x"
    pairs = [(name, b"1") for name in dropped.split()]
    kept = [
        (b"content-type", b"text/html"),
        (b"etag", b'"x"'),
        (b"link", b"</a>"),
        (b"content-security-policy", b"default-src *"),
    ]
    assert left(way, *pairs, *kept) == kept
    assert left(way, (b"connection", b"x-one"), (b"x-one", b"1")) == []


@BOTH
def test_a_length_passes_where_it_is_true(way: Way) -> None:
    length = (b"content-length", b"5")
    assert left(way, length) == [length]
    assert left(way, length, status=304) == [length]
    assert left(way, length, status=204) == []
    assert left(way, length, (b"transfer-encoding", b"chunked")) == []


def test_on_the_apis_origin_a_page_is_in_a_sandbox_and_decides_nothing() -> None:
    names = (
        b"set-cookie set-cookie2 clear-site-data strict-transport-security public-key-pins expect-ct nel report-to "
        b"reporting-endpoints service-worker-allowed www-authenticate origin-agent-cluster access-control-allow-origin "
        b"access-control-allow-credentials access-control-expose-headers x-content-type-options referrer-policy"
    )
    pairs = tuple((name, b"x") for name in names.split())
    assert headers.from_program(pairs, 200, PATH) == SANDBOX
    policy = (b"content-security-policy", b"sandbox allow-scripts allow-same-origin")
    found = headers.from_program((policy,), 200, PATH)
    assert found[0] == policy and (b"content-security-policy", b"sandbox") in found, "each policy counts; ours is the strictest"


def test_on_its_own_origin_it_decides_for_itself() -> None:
    pairs = ((b"access-control-allow-origin", b"*"), (b"www-authenticate", b"Basic"), (b"x-frame-options", b"DENY"))
    assert headers.from_program(pairs, 200, HOST) == pairs


@pytest.mark.parametrize(
    ("cookie", "passed"),
    [
        (b"a=1; Path=/; HttpOnly", [b"a=1; Path=/; HttpOnly"]),
        (b"a=1; Domain=ws.localhost; Path=/", [b"a=1; Path=/"]),
        (b"a=1;domain = .ws.localhost", [b"a=1"]),
        (b"a=domain=x; DOMAIN=y;Domain=z", [b"a=domain=x"]),
        (b"perdure-share=forged; Path=/", []),
        (b" __Host-perdure-share =forged", []),
    ],
)
def test_a_cookie_is_for_this_host(cookie: bytes, passed: list[bytes]) -> None:
    assert [value for _, value in left(HOST, (b"set-cookie", cookie))] == passed


@pytest.mark.parametrize(
    ("location", "passed"),
    [
        (b"/login?x=1", b"/v1/workspaces/demo/ports/8080/login?x=1"),
        (b"http://localhost:8080/login", b"/v1/workspaces/demo/ports/8080/login"),
        (b"HTTP://LOCALHOST:8080", b"/v1/workspaces/demo/ports/8080/"),
        (b"http://127.0.0.1:8080/", b"/v1/workspaces/demo/ports/8080/"),
        (b"http://localhost:8081/", b"http://localhost:8081/"),
        (b"http://localhost/", b"http://localhost/"),
        (b"http://localhost:8080.evil.example/", b"http://localhost:8080.evil.example/"),
        (b"//evil.example/", b"//evil.example/"),
        (b"/\\evil.example/", b"/\\evil.example/"),
        (b"relative", b"relative"),
        (b"https://elsewhere.example/", b"https://elsewhere.example/"),
    ],
)
def test_redirects_stay_below_the_prefix(location: bytes, passed: bytes) -> None:
    assert left(PATH, (b"location", location)) == [(b"location", passed)]
    assert left(HOST, (b"location", location)) == [(b"location", location)]


# ------------------------------------------------------------------------------------------------------------- other sites


@pytest.mark.parametrize(
    ("pairs", "method", "foreign"),
    [
        ((), "GET", False),
        ((), "POST", False),  # no browser
        (((b"origin", b"http://me:1"),), "POST", False),
        (((b"origin", b"HTTP://ME:1"),), "POST", False),
        (((b"origin", b"http://me"),), "POST", True),
        (((b"origin", b"http://other--80.ws.localhost"),), "GET", True),
        (((b"origin", b"null"),), "GET", True),
        (((b"origin", b"http://[me"),), "GET", True),
        (((b"sec-fetch-site", b"same-origin"),), "POST", False),
        (((b"sec-fetch-site", b"none"),), "GET", False),
        (((b"sec-fetch-site", b"same-site"), (b"sec-fetch-mode", b"no-cors")), "GET", True),
        (((b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"navigate")), "GET", False),
        (((b"sec-fetch-site", b"same-site"), (b"sec-fetch-mode", b"navigate")), "POST", True),
        (((b"sec-fetch-site", b"same-site"), (b"sec-fetch-mode", b"navigate"), (b"sec-fetch-dest", b"document")), "GET", False),
        (((b"sec-fetch-site", b"same-site"), (b"sec-fetch-mode", b"navigate"), (b"sec-fetch-dest", b"iframe")), "GET", True),
        (((b"sec-fetch-site", b"same-origin"), (b"sec-fetch-mode", b"navigate"), (b"sec-fetch-dest", b"iframe")), "GET", False),
    ],
)
def test_whose_page_asks(pairs: Headers, method: str, foreign: bool) -> None:
    assert headers.is_foreign(((b"host", b"me:1"), *pairs), method) is foreign


@pytest.mark.parametrize(
    ("pairs", "found"),
    [
        ((), (False, 0)),
        (((b"content-length", b"0"),), (False, 0)),
        (((b"content-length", b"7"),), (True, 7)),
        (((b"transfer-encoding", b"chunked"),), (True, None)),
        (((b"transfer-encoding", b"chunked"), (b"content-length", b"7")), (True, None)),
    ],
)
def test_bodies(pairs: Headers, found: tuple[bool, int | None]) -> None:
    assert headers.body_length(pairs) == found
