"""AWS signatures: those that AWS's own library makes are verified, and nothing else is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.access.signatures import SKEW_S, Signed, read, secret_of, verify
from perdure.core.errors import SignatureRefused

SECRET, KEY_ID = "wJalr/XUtnFEMI+K7MDENG", "key_0123"
URL = "http://localhost:7777/2025-12-01/durable-executions/arn%3Aaws%3Alambda%3A%24LATEST%2Fdurable-execution%2Fn%2Fi/state"


def sign(
    method: str = "POST",
    url: str = URL + "?CheckpointToken=a%2Bb%3D%3D&Marker=&Statuses=B&Statuses=A",
    body: bytes = b'{"a": 1}',
    headers: Sequence[tuple[str, str]] = (("X-Amz-Target", "a  b "), ("Content-Type", "application/json")),
    *,
    secret: str = SECRET,
    service: str = "lambda",
) -> Signed:
    request = AWSRequest(method=method, url=url, data=body, headers=dict(headers))
    SigV4Auth(Credentials(KEY_ID, secret), service, "eu-central-1").add_auth(request)
    parts = urlsplit(url)
    sent = [("Host", parts.netloc), *request.headers.items()]
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in sent]
    return Signed(method, parts.path.encode(), parts.query.encode(), raw)


def verified(request: Signed, body: bytes = b'{"a": 1}', *, now: datetime | None = None, secret: str = SECRET) -> str:
    signature = read(request, now or datetime.now(UTC))
    verify(signature, secret, request, body)
    return signature.access_key_id


def with_header(request: Signed, name: str, value: str) -> Signed:
    kept = [one for one in request.headers if one[0] != name.encode()]
    return replace(request, headers=[*kept, (name.encode(), value.encode())])


def test_what_botocore_signs_counts() -> None:
    assert verified(sign()) == KEY_ID
    assert verified(sign(service="states", url="http://localhost/")) == KEY_ID
    assert verified(sign("GET", body=b""), b"") == KEY_ID
    assert verified(sign(url="http://localhost:1//a/./b/../c/?x")) == KEY_ID


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.text("ab %/é+~._-", min_size=1, max_size=4), st.text("ab &=%/é+~", max_size=4)), max_size=4),
    st.text("ab/.%é ~$:", max_size=12),
    st.binary(max_size=20),
)
def test_whatever_botocore_signs_counts(query: list[tuple[str, str]], path: str, body: bytes) -> None:
    from botocore.utils import percent_encode, percent_encode_sequence  # as its serializer writes them

    url = f"http://localhost/{percent_encode(path, safe='/~')}?{percent_encode_sequence(query)}"
    assert verified(sign(url=url, body=body), body) == KEY_ID


@pytest.mark.parametrize(
    "tampered",
    [
        lambda request: replace(request, method="PUT"),
        lambda request: replace(request, raw_path=request.raw_path.replace(b"durable-execution%2Fn", b"durable-execution%2Fm")),
        lambda request: replace(request, raw_path=request.raw_path.replace(b"%2F", b"/")),
        lambda request: replace(request, query=request.query.replace(b"Statuses=A", b"Statuses=C")),
        lambda request: replace(request, query=request.query + b"&more=1"),
        lambda request: with_header(request, "host", "elsewhere"),
        lambda request: with_header(request, "x-amz-target", "another"),
        lambda request: with_header(request, "x-amz-durable-execution-name", "mine"),
        lambda request: with_header(request, "x-amz-content-sha256", "0" * 64),
        lambda request: with_header(request, "x-amz-content-sha256", "UNSIGNED-PAYLOAD"),
        lambda request: with_header(request, "x-amz-content-sha256", "STREAMING-UNSIGNED-PAYLOAD-TRAILER"),
        lambda request: replace(request, headers=[*request.headers, (b"host", b"elsewhere")]),
        lambda request: replace(request, headers=[*request.headers, (b"x-amz-target", b"more")]),
        lambda request: replace(request, headers=[*request.headers, *request.headers]),
    ],
)
def test_whatever_was_changed_on_the_way_is_refused(tampered: object) -> None:
    request = sign()
    assert callable(tampered)
    with pytest.raises(SignatureRefused):
        verified(tampered(request))


def test_another_body_and_another_secret_are_refused() -> None:
    with pytest.raises(SignatureRefused, match="does not match"):
        verified(sign(), b'{"a": 2}')
    with pytest.raises(SignatureRefused, match="does not match"):
        verified(sign(secret="another"))


def test_a_body_that_is_not_signed_is_refused_with_a_reason() -> None:
    """Also where its signer has said so before it signed."""
    for said in ("UNSIGNED-PAYLOAD", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"):
        with pytest.raises(SignatureRefused, match="is not signed"):
            verified(sign(headers=(("X-Amz-Content-SHA256", said),)))


@pytest.mark.parametrize("off_s", [SKEW_S + 5, -SKEW_S - 5])
def test_a_clock_that_is_far_off_is_refused(off_s: float) -> None:
    request = sign()
    assert verified(request, now=datetime.now(UTC) + timedelta(seconds=off_s * 0.9)) == KEY_ID
    with pytest.raises(SignatureRefused, match="and it is") as caught:
        verified(request, now=datetime.now(UTC) + timedelta(seconds=off_s))
    assert caught.value.hint == "Set the client's clock: it may be off by 300 s."


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("authorization", "AWS4-HMAC-SHA256"),
        ("authorization", "AWS4-HMAC-SHA256 Credential=a/b, SignedHeaders=host, Signature=0"),
        ("authorization", f"AWS4-HMAC-SHA256 Credential=k/20260101/r/s3/aws4_request, SignedHeaders=host, Signature={'0' * 64}"),
        ("authorization", f"AWS4-ECDSA-P256-SHA256 Credential=k/20260101/r/lambda/aws4_request, Signature={'0' * 64}"),
        ("x-amz-date", "yesterday"),
        ("x-amz-date", "20260101"),
        ("x-amz-date", "20260231T000000Z"),
    ],
)
def test_what_is_no_signature_is_refused(name: str, value: str) -> None:
    with pytest.raises(SignatureRefused):
        verified(with_header(sign(), name, value))


def test_two_dates_and_two_signatures_are_refused() -> None:
    request = sign()
    for name in (b"x-amz-date", b"authorization"):
        twice = [one for one in request.headers if one[0] == name]
        with pytest.raises(SignatureRefused):
            verified(replace(request, headers=[*request.headers, *twice]))


def test_a_presigned_url_is_refused_with_a_reason() -> None:
    with pytest.raises(SignatureRefused, match="presigned"):
        verified(sign(url=URL + "?X-Amz-Signature=0"))


def test_a_signature_for_another_service_is_refused() -> None:
    with pytest.raises(SignatureRefused, match="'s3'"):
        verified(sign(service="s3"))


def test_a_secret_is_of_one_key_and_one_installation() -> None:
    secret = secret_of(b"k" * 32, "key_1")
    assert len(secret) == 40 and secret == secret_of(b"k" * 32, "key_1")
    others = {secret_of(b"l" * 32, "key_1"), secret_of(b"k" * 32, "key_2"), secret_of(b"k" * 32, "key_1", b"salt")}
    assert len(others | {secret}) == 4
