"""What a webhook's receiver gets, and when it is tried again. Pure.

Signed by the scheme of Standard Webhooks (standardwebhooks.com): HMAC-SHA256 over id, timestamp and body, with a secret that is
written ``whsec_`` and base64.
"""

from __future__ import annotations

import base64
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from perdure.core.errors import InvalidRequest
from perdure.journal.feed import FeedEvent

SECRET_PREFIX = "whsec_"  # noqa: S105 - how it begins
SECRET_BYTES = 32
URL_LENGTH_MAX = 2048
_PORTS = {"http": 80, "https": 443}

#: After the first attempt that fails; doubled with each that follows, up to the second.
BACKOFF_S = 5.0
BACKOFF_MAX_S = 4 * 3600.0
#: An event is given up when its first attempt was so long ago.
GIVE_UP_S = 24 * 3600.0
#: How much of a wait is chance, so that what failed together is not tried again together.
JITTER = 0.2


@dataclass(frozen=True, slots=True)
class Target:
    """A URL, taken apart. ``host`` without brackets; ``path`` with its query."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def target(url: str) -> Target:
    """Raises InvalidRequest for what is no URL that something can be sent to."""
    hint = "Give an https:// URL, such as https://example.org/hooks/perdure."
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidRequest(f"The webhook's URL is not valid: {error}.", hint=hint) from error
    if parts.scheme not in _PORTS or not parts.hostname:
        raise InvalidRequest("A webhook's URL begins with https:// or http:// and a host.", hint=hint)
    if parts.username is not None or parts.password is not None:
        raise InvalidRequest("A webhook's URL has no user and no password in it.", hint="Check the signature instead.")
    if len(url) > URL_LENGTH_MAX or not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidRequest(
            f"A webhook's URL is at most {URL_LENGTH_MAX} printable ASCII characters, without blanks.", hint=hint
        )
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, parts.hostname, port or _PORTS[parts.scheme], path)


def shown_secret(secret: bytes) -> str:
    """As receivers are given it."""
    return SECRET_PREFIX + base64.b64encode(secret).decode()


def signature(secret: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    """The value of ``webhook-signature``."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(secret, signed, "sha256")).decode()


def headers(secret: bytes, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Beside those of HTTP itself. ``timestamp``: seconds since 1970, of this attempt."""
    return {
        "content-type": "application/json",
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature(secret, message_id, timestamp, body),
    }


def message_id(webhook_id: str, seq: int) -> str:
    """The same for every attempt: by it a receiver knows what it has already."""
    return f"msg_{webhook_id.partition('_')[2]}_{seq}"


def body(event: FeedEvent) -> bytes:
    """``type``, ``timestamp``, ``data``, as Standard Webhooks proposes; the data are those of the feed."""
    data = {
        "seq": event.seq,
        "workspace_id": event.workspace_id,
        "workspace": event.workspace,
        "entry_seq": event.entry_seq,
        "generation": event.generation,
        "body": event.body,
    }
    return _json({"type": event.kind, "timestamp": event.at.isoformat(), "data": data})


def test_body(timestamp: str) -> bytes:
    """Of ``perdure webhook test``."""
    return _json({"type": "test", "timestamp": timestamp, "data": {}})


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode()


def next_wait_s(attempts: int, age_s: float, chance: float) -> float | None:
    """Seconds until the next attempt after ``attempts`` that failed, the first of them ``age_s`` ago; None to give up.
    ``chance`` is between 0 and 1."""
    wait_s = min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(attempts - 1, 32)) * (1 + JITTER * (2 * chance - 1))
    return None if age_s + wait_s > GIVE_UP_S else wait_s
