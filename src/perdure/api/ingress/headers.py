"""What passes between a client and a program in a workspace. Pure.

To the program goes nothing that is ours: no API key, no share token, no cookie of the API's origin, nothing about framing (the
next connection has its own, so nobody smuggles a request in), and nothing that claims to come from a proxy but what this one
says. A name with an underscore counts as with a dash, since CGI and WSGI cannot tell them apart.

From the program goes, in the host form, everything but what concerns the connection and cookies for other hosts. In the path form
it would be the API's own origin that a browser believes it to speak for, so whatever acts on a whole origin is dropped, and the
page is put into a sandbox.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from perdure.wire.node import Headers

OUR_KEYS = b"pdk_"
SHARE_HEADER = "perdure-share"
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade".split()
)
_FORWARDED = frozenset(b"forwarded via x-real-ip x-client-ip x-original-url x-rewrite-url".split())
#: What makes no sense at the program, since its pages are on an origin that is not its own.
_ORIGIN_REQUEST = frozenset(b"cookie origin referer".split())
_ORIGIN_ANSWER = frozenset(
    b"set-cookie set-cookie2 clear-site-data strict-transport-security public-key-pins expect-ct nel report-to "
    b"reporting-endpoints service-worker-allowed www-authenticate origin-agent-cluster x-content-type-options "
    b"referrer-policy".split()
)
SANDBOX: Headers = (
    (b"content-security-policy", b"sandbox"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)


class Form(StrEnum):
    HOST = "host"
    PATH = "path"


@dataclass(frozen=True, slots=True)
class Way:
    """How a request came. ``host`` is its Host header, ``prefix`` what the path form has before the program's own path."""

    form: Form
    port: int
    host: str
    scheme: str
    client: str | None
    prefix: str = ""


def cookie_name(*, is_secure: bool) -> str:
    """Of the cookie that a share link is exchanged for. With TLS no other host, above or beside, can set one of this name."""
    return "__Host-perdure-share" if is_secure else "perdure-share"


_OUR_COOKIES = frozenset({cookie_name(is_secure=True), cookie_name(is_secure=False)})


# ------------------------------------------------------------------------------------------------------------ to the program


def to_program(headers: Headers, way: Way) -> Headers:
    """A request's headers as the program gets them."""
    named = _named_by_connection(headers)
    kept: list[tuple[bytes, bytes]] = [
        (b"host", way.host.encode("latin-1") if way.form is Form.HOST else b"localhost:%d" % way.port)
    ]
    for raw, value in headers:
        name = raw.lower().replace(b"_", b"-")
        if name in named or name == b"host" or not _may_enter(name, value, way.form):
            continue
        passed = _other_cookies(value) if name == b"cookie" else value
        if passed or not value:
            kept.append((raw, passed))
    kept += [(b"x-forwarded-host", way.host.encode("latin-1")), (b"x-forwarded-proto", way.scheme.encode())]
    if way.client is not None:
        kept.append((b"x-forwarded-for", way.client.encode()))
    if way.prefix:
        kept.append((b"x-forwarded-prefix", way.prefix.encode("latin-1")))
    return tuple(kept)


def _may_enter(name: bytes, value: bytes, form: Form) -> bool:
    if name in _HOP_BY_HOP or name in {b"content-length", b"expect"}:
        return False
    if name in _FORWARDED or name.startswith((b"x-forwarded", b"perdure-")):
        return False
    if name == b"authorization":
        return not is_our_key(value)
    return form is Form.HOST or name not in _ORIGIN_REQUEST


def is_our_key(authorization: bytes) -> bool:
    """Whether an Authorization is meant for Perdure; any other is the program's own affair."""
    scheme, _, credentials = authorization.strip().partition(b" ")
    return scheme.lower() == b"bearer" and credentials.strip().startswith(OUR_KEYS)


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    values = [value for name, value in headers if name.lower() == b"connection"]
    return frozenset(part.strip().lower() for value in values for part in value.split(b","))


def shares_in_cookies(headers: Headers, name: str) -> list[str]:
    """All cookies of that name: one that another host has planted does not hide ours."""
    found = []
    for header, value in headers:
        if header.lower() == b"cookie":
            pairs = [part.strip().partition(b"=") for part in value.split(b";")]
            found += [content.decode("latin-1") for key, _, content in pairs if key == name.encode()]
    return found


def _other_cookies(value: bytes) -> bytes:
    pairs = [part.strip() for part in value.split(b";")]
    return b"; ".join(part for part in pairs if part.partition(b"=")[0].decode("latin-1") not in _OUR_COOKIES)


def is_foreign(headers: Headers, method: str) -> bool:
    """Whether another site's page asks, with a cookie that the browser added by itself. Workspaces below one domain are one site
    to a browser, so that cookies alone do not keep their pages apart. Following a link is not foreign; to put a page into a frame
    is, for whoever frames it may lead its visitor's clicks."""
    found = {name.lower(): value for name, value in headers}
    origin = found.get(b"origin")
    if origin is not None:
        try:
            return urlsplit(origin.decode("latin-1")).netloc.lower() != found.get(b"host", b"").decode("latin-1").lower()
        except ValueError:
            return True
    if found.get(b"sec-fetch-site", b"none") in {b"none", b"same-origin"}:
        return False
    is_followed = found.get(b"sec-fetch-mode") == b"navigate" and found.get(b"sec-fetch-dest", b"document") == b"document"
    return not (method in {"GET", "HEAD"} and is_followed)


def wants_page(headers: Headers) -> bool:
    """Whether a person looks at the answer."""
    found = {name.lower(): value for name, value in headers}
    return found.get(b"sec-fetch-mode") == b"navigate" or b"text/html" in found.get(b"accept", b"")


def body_length(headers: Headers) -> tuple[bool, int | None]:
    """Whether a request has a body, and how long it is said to be."""
    found = {name.lower(): value for name, value in headers}
    if b"transfer-encoding" in found:
        return True, None
    length = int(found.get(b"content-length", b"0"))
    return length > 0, length


# ---------------------------------------------------------------------------------------------------------- from the program


def from_program(headers: Headers, status: int, way: Way) -> Headers:
    """An answer's headers as the client gets them."""
    named = _named_by_connection(headers)
    chunked = any(name == b"transfer-encoding" for name, _ in headers)
    kept: list[tuple[bytes, bytes]] = []
    for name, value in headers:
        if name in _HOP_BY_HOP or name in named or name in {b"alt-svc", b"date", b"x-request-id"} or name.startswith(b"perdure-"):
            continue
        if name == b"content-length" and (chunked or status == 204):
            continue
        passed = _on_our_origin(name, value, way) if way.form is Form.PATH else _on_its_own(name, value)
        if passed is not None:
            kept.append((name, passed))
    return tuple(kept) if way.form is Form.HOST else (*kept, *SANDBOX)


def _on_our_origin(name: bytes, value: bytes, way: Way) -> bytes | None:
    if name in _ORIGIN_ANSWER or name.startswith(b"access-control-"):
        return None
    return _below_prefix(value, way) if name in {b"location", b"content-location"} else value


def _on_its_own(name: bytes, value: bytes) -> bytes | None:
    return _for_this_host(value) if name == b"set-cookie" else value


def _for_this_host(cookie: bytes) -> bytes | None:
    """A cookie without its Domain, and none at all if it is named like ours: other workspaces are hosts of the same domain."""
    first, *attributes = cookie.split(b";")
    if first.partition(b"=")[0].strip().decode("latin-1") in _OUR_COOKIES:
        return None
    kept = [part for part in attributes if part.partition(b"=")[0].strip().lower() != b"domain"]
    return b";".join([first, *kept])


def _below_prefix(location: bytes, way: Way) -> bytes:
    """A redirect within the program, which does not know that it stands below a prefix."""
    local = re.match(rb"(?i)https?://(localhost|127\.0\.0\.1|\[::1\])(:(\d+))?(?=/|\Z)", location)
    if local and int(local[3] or b"80") == way.port:
        location = location[local.end() :] or b"/"
    if location.startswith(b"/") and not location.startswith((b"//", b"/\\")):
        return way.prefix.encode("latin-1") + location
    return location
