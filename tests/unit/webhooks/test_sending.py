"""One POST to a real receiver that behaves as receivers do, and addresses where nothing may be sent to."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from perdure.core.errors import InvalidRequest
from perdure.gateway.addresses import IPAddress
from perdure.gateway.egress import Dialer, EgressRefused
from perdure.gateway.outward import Outward
from perdure.gateway.rules import EgressRules
from perdure.webhooks import messages
from perdure.webhooks.sending import Sender
from tests.fakes import receiver as fake
from tests.fakes.receiver import Receiver, receiver


def outward(*allowed: str, names: dict[str, list[str]] | None = None) -> Outward:
    async def resolve(name: str) -> Sequence[IPAddress]:
        return [ip_address(text) for text in (names or {}).get(name, [])]

    return Outward(Dialer(EgressRules.parse(allowed), resolver=resolve, setting="PERDURE_WEBHOOK_PRIVATE_ALLOW"))


def sender(to: Receiver, deadline_s: float = 10, **options: object) -> Sender:
    return Sender(outward(f"127.0.0.1:{to.port}").open, deadline_s=deadline_s, **options)  # type: ignore[arg-type]


async def test_what_is_sent_arrives_whole() -> None:
    async with receiver() as to:
        to.answers.append(fake.EARLY)
        attempt = await sender(to).post(messages.target(to.url), {"webhook-id": "msg_1"}, b'{"a":1}')
    assert (attempt.status, attempt.error, attempt.is_delivered) == (200, "", True)
    (one,) = to.received
    assert (one.path, one.body, one.id) == ("/hook?token=t", b'{"a":1}', "msg_1")
    assert one.headers["host"] == f"127.0.0.1:{to.port}"


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (fake.FAILS, 500, "HTTP status 500"),
        (fake.MOVED, 302, "a redirect is not followed"),
        (fake.GARBAGE, None, "is not HTTP"),
        (fake.NOTHING, None, "without an answer"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 100_000, None, "not HTTP"),
    ],
)
async def test_a_receiver_that_does_not_take_it(answer: bytes, status: int | None, words: str) -> None:
    async with receiver() as to:
        to.answers.append(answer)
        attempt = await sender(to).post(messages.target(to.url), {}, b"{}")
    assert (attempt.status, attempt.is_delivered) == (status, False)
    assert words in attempt.error
    assert "secret" not in attempt.error, "what a receiver says in its body is nobody's business"
    assert len(to.received) == 1, "nothing is tried again here, and nothing elsewhere"


async def test_a_receiver_that_hangs_is_left() -> None:
    async with receiver() as to:
        to.answers.append(fake.HANGS)
        attempt = await sender(to, deadline_s=0.3).post(messages.target(to.url), {}, b"{}")
    assert attempt.error == "The receiver did not answer within 0.3 s."


async def test_nobody_there() -> None:
    async with receiver() as to:
        gone = to.url, sender(to)
    await asyncio.sleep(0)
    attempt = await gone[1].post(messages.target(gone[0]), {}, b"{}")
    assert attempt.status is None
    assert "cannot be reached" in attempt.error


@pytest.mark.parametrize(
    ("host", "port"),
    [
        *(("127.0.0.1", 80), ("10.1.2.3", 443), ("169.254.169.254", 80), ("::1", 443), ("inside.example", 443)),
        *(("::ffff:127.0.0.1", 80), ("metadata.example", 80), ("0.0.0.0", 80), ("192.168.1.1", 443)),
    ],
)
async def test_the_servers_own_network_is_refused(host: str, port: int) -> None:
    guarded = outward("10.1.2.3:444", names={"inside.example": ["10.0.0.7"], "metadata.example": ["169.254.169.254"]})
    with pytest.raises(EgressRefused):
        await guarded.check(host, port)
    with pytest.raises(EgressRefused):
        await guarded.open(host, port)


async def test_the_operator_may_open_it_by_a_setting_of_its_own() -> None:
    with pytest.raises(EgressRefused, match=r"PERDURE_WEBHOOK_PRIVATE_ALLOW=10\.1\.2\.3:443"):
        await outward().check("10.1.2.3", 443)
    await outward("10.1.2.3:443").check("10.1.2.3", 443)
    await outward(names={"example.org": ["93.184.215.14"]}).check("example.org", 443)
    with pytest.raises(InvalidRequest):
        await outward().check("127.1", 80)


async def test_a_name_that_leads_elsewhere_later_is_judged_again() -> None:
    names = {"example.org": ["93.184.215.14"]}
    guarded = outward(names=names)
    await guarded.check("example.org", 80)
    names["example.org"] = ["127.0.0.1"]
    attempt = await Sender(guarded.open).post(messages.target("http://example.org/"), {}, b"{}")
    assert "127.0.0.1 is a loopback address" in attempt.error


# --------------------------------------------------------------------------------------------------------------------- TLS


def certificate(tmp_path: Path) -> Path:
    """Of 127.0.0.1, signed by itself, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "receiver")])
    since = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(since)
        .not_valid_after(since + datetime.timedelta(days=36500))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path / "receiver.pem"
    plain = serialization.NoEncryption()
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


async def test_a_receiver_is_known_by_its_certificate(tmp_path: Path) -> None:
    pem = certificate(tmp_path)
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(pem)
    async with receiver(ours) as to:
        knows = sender(to, tls=lambda: ssl.create_default_context(cafile=str(pem)))
        assert (await knows.post(messages.target(to.url), {}, b"{}")).status == 200
        stranger = await sender(to).post(messages.target(to.url), {}, b"{}")
        assert "no TLS that can be trusted" in stranger.error
    assert len(to.received) == 1, "nothing was sent to whom nobody knows"
