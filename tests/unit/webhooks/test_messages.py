"""What is signed how, when an event is sent again, and which URLs are none."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.errors import InvalidRequest
from perdure.core.ids import WorkspaceId
from perdure.journal.feed import FeedEvent
from perdure.webhooks import messages

EVENT = FeedEvent(7, datetime(2026, 3, 1, tzinfo=UTC), "hibernated", 3, {"to": "hibernated"}, WorkspaceId("ws_1"), "erin", 12)


def test_the_signature_is_that_of_standard_webhooks() -> None:
    """The example that the scheme's own libraries are tested with."""
    secret = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    assert messages.shown_secret(secret) == "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    signed = messages.headers(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signed["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert (signed["webhook-id"], signed["webhook-timestamp"]) == ("msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330")


def test_a_message_says_what_the_feed_says() -> None:
    told = json.loads(messages.body(EVENT))
    assert (told["type"], told["timestamp"]) == ("hibernated", "2026-03-01T00:00:00+00:00")
    assert told["data"]["seq"] == 7
    assert told["data"]["workspace"] == "erin"
    assert told["data"]["body"] == {"to": "hibernated"}


def test_an_event_has_one_id_for_each_webhook_and_it_stays() -> None:
    assert messages.message_id("whk_a", 7) == messages.message_id("whk_a", 7)
    assert len({messages.message_id(one, seq) for one in ("whk_a", "whk_b") for seq in (7, 8)}) == 4


@given(st.floats(0, 1))
def test_waits_double_up_to_a_limit_and_end_after_a_day(chance: float) -> None:
    age_s, waits = 0.0, []
    for attempts in range(1, 100):
        wait_s = messages.next_wait_s(attempts, age_s, chance)
        if wait_s is None:
            break
        assert 0.8 * 5 <= wait_s <= 1.2 * 4 * 3600
        waits.append(wait_s)
        age_s += wait_s
    assert waits == sorted(waits)
    assert 12 < len(waits) < 25
    assert 24 * 3600 - 1.2 * 4 * 3600 <= age_s <= 24 * 3600


def test_chance_spreads_the_waits() -> None:
    assert (messages.next_wait_s(1, 0, 0.0), messages.next_wait_s(1, 0, 0.5), messages.next_wait_s(1, 0, 1.0)) == (4.0, 5.0, 6.0)


@pytest.mark.parametrize(
    ("url", "host", "port", "path", "header"),
    [
        ("https://Example.org", "example.org", 443, "/", "example.org"),
        ("https://example.org:8443/a/b?c=d", "example.org", 8443, "/a/b?c=d", "example.org:8443"),
        ("http://[2001:db8::7]/x#part", "2001:db8::7", 80, "/x", "[2001:db8::7]"),
    ],
)
def test_urls(url: str, host: str, port: int, path: str, header: str) -> None:
    found = messages.target(url)
    assert (found.host, found.port, found.path, found.host_header) == (host, port, path, header)


@pytest.mark.parametrize(
    "url",
    [
        *("", "example.org/hook", "ftp://example.org", "https://", "https:///hook", "file:///etc/passwd", "https://a:99999/"),
        *("https://user:secret@example.org/", "https://example.org/ü", "https://example.org/a b", "https://e.org/\r\nx: y"),
        *("https://[::1", "https://example.org/" + "a" * 2100, "javascript:alert(1)"),
    ],
)
def test_what_is_no_url_for_a_webhook(url: str) -> None:
    with pytest.raises(InvalidRequest):
        messages.target(url)
