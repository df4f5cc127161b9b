"""Addresses of ports. Pure.

    host form   {workspace}--{port}.{domain}                 a web origin of its own for each workspace and port
    path form   /v1/workspaces/{workspace}/ports/{port}/…    on the API's own origin, for programs

A host name's label names a workspace by its id, ``ws-01k…`` (no underscore: many a library refuses those in host names), or, in
the default tenant, by its name. ``demo`` is ``demo--8080``, its branch ``demo@try`` is ``demo--try--8080``; a name with two
dashes in a row, or one that is too long or looks like an id, has no label but its id's. So a label leads to one name only, and
since ids are unique and names belong to one tenant, no two tenants' pages ever share an origin.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from perdure.core.errors import InvalidRequest, NotFound
from perdure.core.ids import NAME

LABEL_MAX = 63
_ID_LABEL = re.compile(r"ws[-_]([0-9a-z]{26})")
_PATH = re.compile(rb"/v1/workspaces/([^/]+)/ports/([0-9]+)(/.*)", re.DOTALL)
_DOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_DEFAULT_PORTS = {"http": 80, "https": 443}
SHARE_PARAMETER = "perdure_share"


@dataclass(frozen=True, slots=True)
class Address:
    """A port of a workspace. ``ref`` is an id, or a name when ``by_name``."""

    ref: str
    port: int
    by_name: bool = True


@dataclass(frozen=True, slots=True)
class PathAddress:
    """``target`` is what the program is asked for: path and query as they came. ``prefix`` is what was before it."""

    ref: str
    port: int
    prefix: str
    target: bytes


# ------------------------------------------------------------------------------------------------------------ host names


def label_of(name: str) -> str | None:
    """The first half of the label by which a name of the default tenant is reached; None when there is none."""
    base, _, branch = name.partition("@")
    label = f"{base}--{branch}" if branch else base
    fits = len(label) + len("--65535") <= LABEL_MAX
    return label if fits and "--" not in base + branch and _read(label) == Address(name, 0) else None


def id_label(workspace_id: str) -> str:
    return workspace_id.replace("_", "-")


def _read(label: str) -> Address | None:
    """What half a label names."""
    if match := _ID_LABEL.fullmatch(label):
        return Address(f"ws_{match[1]}", 0, by_name=False)
    parts = label.split("--")
    name = "@".join(parts)
    return Address(name, 0) if len(parts) <= 2 and NAME.fullmatch(name) else None


def read_label(label: str) -> Address:
    """``demo--8080``. Raises NotFound for what names nothing."""
    rest, dashes, digits = label.rpartition("--")
    found = _read(rest) if dashes else None
    if found is None or not digits.isascii() or not digits.isdecimal() or not is_port(int(digits)):
        raise NotFound(f"There is no port of a workspace at {label!r}.", hint="Write WORKSPACE--PORT.")
    return Address(found.ref, int(digits), found.by_name)


def is_port(number: int) -> bool:
    return 0 < number < 65536


@dataclass(frozen=True, slots=True)
class Domain:
    """What ``PERDURE_INGRESS_DOMAIN`` says. ``port`` None: the one that the server listens on."""

    name: str
    scheme: str = "http"
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> Domain:
        """``ws.localhost``, or with what stands before the server: ``https://ws.example.com[:PORT]``."""
        scheme, found, rest = text.strip().lower().partition("://")
        try:
            parts = urlsplit(f"//{rest if found else scheme}")
            name, port = parts.hostname or "", parts.port
        except ValueError:
            name, port, parts = "", None, urlsplit("")
        odd = parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc or (port is not None and not found)
        if odd or not _DOMAIN.fullmatch(name) or (found and scheme not in _DEFAULT_PORTS):
            raise InvalidRequest(
                f"{text!r} is not a domain for ports.",
                hint="Set PERDURE_INGRESS_DOMAIN to ws.localhost or https://ws.example.com.",
            )
        return cls(name, scheme, port or _DEFAULT_PORTS[scheme]) if found else cls(name)

    @property
    def is_secure(self) -> bool:
        return self.scheme == "https"

    def address(self, host: str) -> Address | None:
        """Of a Host header; None for a name that is not below this domain. Raises NotFound for one that names nothing."""
        name = re.sub(r":[0-9]*\Z", "", host.lower())
        label = name.removesuffix("." + self.name)
        return read_label(label) if label != name else None

    def host(self, label: str, port: int, listen_port: int) -> str:
        """As a Host header has it."""
        at = self.port or listen_port
        suffix = "" if at == _DEFAULT_PORTS[self.scheme] else f":{at}"
        return f"{label}--{port}.{self.name}{suffix}"

    def url(self, label: str, port: int, listen_port: int) -> str:
        return f"{self.scheme}://{self.host(label, port, listen_port)}/"


# ----------------------------------------------------------------------------------------------------------------- paths


def path_address(raw_path: bytes, query: bytes) -> PathAddress | None:
    """Read from the path as it came: decoding it first would change what the program is asked for. Raises InvalidRequest."""
    match = _PATH.fullmatch(raw_path)
    if match is None:
        return None
    if len(match[2]) > 5 or not is_port(int(match[2])):
        raise InvalidRequest(f"{match[2][:20].decode()} is not a TCP port.", hint="Ports are 1 to 65535.")
    prefix = raw_path[: -len(match[3])].decode("latin-1")
    return PathAddress(unquote(match[1].decode("latin-1")), int(match[2]), prefix, with_query(match[3], query))


def with_query(path: bytes, query: bytes) -> bytes:
    return path + b"?" + query if query else path


def take_share(query: bytes) -> tuple[str | None, bytes]:
    """The token in a query, and the query without it; all else stays as it is, byte for byte."""
    name = SHARE_PARAMETER.encode() + b"="
    parts = query.split(b"&")
    tokens = [part for part in parts if part.startswith(name)]
    if not tokens:
        return None, query
    rest = b"&".join(part for part in parts if not part.startswith(name))
    return tokens[-1].removeprefix(name).decode("latin-1"), rest
