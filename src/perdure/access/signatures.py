"""AWS Signature Version 4 in a request's headers: whether it was made with a secret. Pure.

Written from the published algorithm ("Create a signed AWS API request" in AWS's IAM guide): a canonical form of the request is
hashed, and signed with a key that is derived from the secret, the day, the region and the service. The region may be any. A
secret is derived from the installation's master key and the API key's id, so it is stored nowhere and ends with its key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote, unquote_to_bytes

from perdure.core.errors import SignatureRefused
from perdure.core.keys import hkdf

ALGORITHM = "AWS4-HMAC-SHA256"
#: What the key of all secrets is derived from the master key for.
PURPOSE = "aws-secret"
#: How far a client's clock may be off, in seconds: within that time a request that was overheard could be sent again.
SKEW_S = 300
SERVICES = frozenset({"lambda", "states"})
_SECRET_BYTES = 30
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256\s+Credential=([^/,\s]{1,128})/(\d{8})/([a-z0-9-]{1,64})/([a-z0-9-]{1,64})/aws4_request,\s*"
    r"SignedHeaders=([a-z0-9;_-]{1,4096}),\s*Signature=([0-9a-f]{64})"
)
_PRESIGNED = b"X-Amz-Signature="
_STAMP = "%Y%m%dT%H%M%SZ"


@dataclass(frozen=True, slots=True)
class Pair:
    """What an AWS client is configured with. It may what the API key may that it belongs to, for as long."""

    access_key_id: str
    secret_access_key: str


@dataclass(frozen=True, slots=True)
class Signed:
    """A request as it came: its path and query as bytes off the wire, before anything is decoded."""

    method: str
    raw_path: bytes
    query: bytes
    headers: Sequence[tuple[bytes, bytes]]

    def values(self, name: str) -> list[str]:
        return [value.decode("latin-1") for key, value in self.headers if key.decode("latin-1").lower() == name]


@dataclass(frozen=True, slots=True)
class Signature:
    access_key_id: str
    day: str
    region: str
    service: str
    names: tuple[str, ...]
    value: str
    stamp: str

    @property
    def scope(self) -> str:
        return f"{self.day}/{self.region}/{self.service}/aws4_request"


def secret_of(key: bytes, key_id: str, salt: bytes = b"") -> str:
    """The secret that belongs to an API key: 40 characters, as AWS's own have. ``salt`` changes with whatever else ends it."""
    return base64.b64encode(hkdf(key, salt, f"1\n{key_id}".encode(), _SECRET_BYTES)).decode()


def is_signed(authorization: str, query: bytes) -> bool:
    """Whether it says that it is: whether that counts is to be seen."""
    return authorization.startswith(ALGORITHM) or (not authorization and _PRESIGNED in query)


def read(request: Signed, now: datetime) -> Signature:
    """The signature that a request carries, which is still to be verified. Raises SignatureRefused for one that could not count,
    whoever made it."""
    if _PRESIGNED in request.query:
        hint = "Sign the headers, or send an API key as Bearer."
        raise SignatureRefused("The signature is in the query (a presigned URL), which is not served here.", hint=hint)
    found = [_AUTHORIZATION.fullmatch(value.strip()) for value in request.values("authorization")]
    match = found[0] if len(found) == 1 else None
    if match is None:
        raise SignatureRefused("The header Authorization is not an AWS signature of version 4.", hint="Let an AWS SDK sign it.")
    access_key_id, day, region, service, names, value = match.groups()
    stamps = request.values("x-amz-date")
    stamp = stamps[0] if len(stamps) == 1 else ""
    _check_time(stamp, day, now)
    signature = Signature(access_key_id, day, region, service, tuple(names.split(";")), value, stamp)
    if service not in SERVICES:
        raise SignatureRefused(f"The request is signed for {service!r}.", hint="Sign it for lambda, or for states.")
    must = {"host"} | {name for key, _ in request.headers if (name := key.decode("latin-1").lower()).startswith("x-amz-")}
    if missing := sorted(must - set(signature.names)):
        raise SignatureRefused(f"The request does not sign {', '.join(missing)}.", hint="Sign host and every x-amz- header.")
    return signature


def _check_time(stamp: str, day: str, now: datetime) -> None:
    try:
        at = datetime.strptime(stamp, _STAMP).replace(tzinfo=UTC)
    except ValueError:
        hint = "Send it as 20260131T235959Z, in UTC."
        raise SignatureRefused("The request has no header X-Amz-Date, or not one instant.", hint=hint) from None
    off_s = abs((now - at).total_seconds())
    if off_s > SKEW_S or not stamp.startswith(day):
        raise SignatureRefused(
            f"The signature is of {stamp}, and it is {now.strftime(_STAMP)} here.",
            hint=f"Set the client's clock: it may be off by {SKEW_S} s.",
        )


def verify(signature: Signature, secret: str, request: Signed, body: bytes) -> None:
    """Raises SignatureRefused unless whoever has the secret has signed this request with this body."""
    text = f"{ALGORITHM}\n{signature.stamp}\n{signature.scope}\n{_hash(_canonical(signature, request, _digest(request, body)))}"
    key = f"AWS4{secret}".encode()
    for part in signature.scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    if not hmac.compare_digest(hmac.digest(key, text.encode("latin-1"), "sha256").hex(), signature.value):
        raise SignatureRefused(
            "The signature does not match the request.",
            hint="Check the secret access key, and that nothing on the way changes path, headers or body.",
        )


def _digest(request: Signed, body: bytes) -> str:
    """The body's digest, as the request states it if it does."""
    digest = hashlib.sha256(body).hexdigest()
    stated = request.values("x-amz-content-sha256")
    if not stated or stated == [digest]:
        return digest
    if stated == ["UNSIGNED-PAYLOAD"] or stated[0].startswith("STREAMING-"):
        raise SignatureRefused(f"The request's body is not signed ({stated[0]}).", hint="Sign the body as a whole.")
    raise SignatureRefused("The request's body is not the one that was signed.", hint="Sign it again.")


def _canonical(signature: Signature, request: Signed, digest: str) -> str:
    headers = [f"{name}:{','.join(' '.join(value.split()) for value in request.values(name))}" for name in signature.names]
    return "\n".join(
        (
            request.method,
            quote(_normal(request.raw_path.decode("latin-1")), safe="/~", encoding="latin-1"),
            _canonical_query(request.query),
            *headers,
            "",
            ";".join(signature.names),
            digest,
        )
    )


def _normal(path: str) -> str:
    """Without empty and dot segments."""
    kept: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del kept[-1:]
        elif part and part != ".":
            kept.append(part)
    return "/" + "/".join(kept) + ("/" if kept and path.endswith("/") else "")


def _canonical_query(query: bytes) -> str:
    pairs = [pair.partition(b"=")[::2] for pair in query.split(b"&") if pair]
    coded = sorted(tuple(quote(unquote_to_bytes(part), safe="-_.~") for part in pair) for pair in pairs)
    return "&".join("=".join(pair) for pair in coded)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("latin-1")).hexdigest()
