"""What the guest's HTTP proxy makes of a request head."""

from __future__ import annotations

import pytest

from perdure.guest.proxy import BadRequest, answer, parse_head


def test_connect_becomes_a_tunnel_and_keeps_early_bytes() -> None:
    target = parse_head(b"CONNECT pypi.example:443 HTTP/1.1\r\nHost: pypi.example:443", b"early")
    assert (target.host, target.port, target.tunnel, target.first) == ("pypi.example", 443, True, b"early")


def test_connect_to_an_ipv6_address() -> None:
    target = parse_head(b"CONNECT [2001:db8::1]:8443 HTTP/1.1", b"")
    assert (target.host, target.port) == ("2001:db8::1", 8443)


def test_a_plain_request_is_sent_in_origin_form_for_one_connection() -> None:
    headers = [b"Host: h.example:81", b"Proxy-Connection: keep-alive", b"Content-Length: 2"]
    head = b"\r\n".join([b"POST http://user:pw@h.example:81/a/b?c=d HTTP/1.1", *headers])
    target = parse_head(head, b"ok")
    assert (target.host, target.port, target.tunnel) == ("h.example", 81, False)
    assert target.first == b"POST /a/b?c=d HTTP/1.1\r\nHost: h.example:81\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


@pytest.mark.parametrize(("url", "path"), [(b"http://h", b"/"), (b"http://h?q=1", b"/?q=1"), (b"HTTP://h/x", b"/x")])
def test_paths_of_plain_requests(url: bytes, path: bytes) -> None:
    target = parse_head(b"GET " + url + b" HTTP/1.0", b"")
    assert (target.host, target.port) == ("h", 80)
    assert target.first.startswith(b"GET " + path + b" HTTP/1.0\r\n")


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1",
        b"GET https://h/ HTTP/1.1",
        b"CONNECT h HTTP/1.1",
        b"CONNECT h:0 HTTP/1.1",
        b"CONNECT h:99999 HTTP/1.1",
        b"CONNECT :443 HTTP/1.1",
        b"CONNECT [::1:443 HTTP/1.1",
        "CONNECT h:４４ HTTP/1.1".encode(),
        b"PRI * HTTP/2.0",
        b"\x16\x03\x01",
        b"",
    ],
)
def test_what_is_not_for_a_proxy_is_refused_with_a_sentence(line: bytes) -> None:
    with pytest.raises(BadRequest, match=r"\.$"):
        parse_head(line, b"")


def test_an_answer_is_one_line_whatever_the_reason_holds() -> None:
    response = answer(403, "Forbidden", "no\r\nSet-Cookie: x")
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"HTTP/1.1 403 Forbidden: no Set-Cookie: x"
    assert b"\r\nSet-Cookie" not in head and body == b"no Set-Cookie: x\n"
    assert f"Content-Length: {len(body)}".encode() in head
