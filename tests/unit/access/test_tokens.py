"""What a share link's token is worth."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.access import tokens
from perdure.access.shares import PortRef, Share, ShareElsewhere, ShareExpired, ShareRevoked, judge
from perdure.access.tokens import Grant
from perdure.core.errors import PerdureError
from perdure.core.ids import DEFAULT_TENANT, LinkId, TenantId, WorkspaceId

KEY = b"k" * 32
WS = WorkspaceId("ws_" + "a" * 26)
GRANT = Grant(DEFAULT_TENANT, WS, 8080, 2_000_000_000, 7)
MOMENT = datetime(2026, 1, 2, tzinfo=UTC)
SHARE = Share(DEFAULT_TENANT, WS, 8080, False, MOMENT, MOMENT, "local")


@given(
    port=st.integers(1, 65535),
    until=st.integers(0, 2**40),
    series=st.integers(0, 2**62 - 1),
    link=st.sampled_from([None, LinkId("lnk_" + "c" * 26)]),
)
def test_a_token_says_what_was_signed(port: int, until: int, series: int, link: LinkId | None) -> None:
    grant = Grant(TenantId("ten_" + "b" * 26), WS, port, until, series, link)
    token = tokens.sign(KEY, grant)
    assert tokens.read(KEY, token) == grant
    assert token.replace("-", "a").replace("_", "a").isalnum(), "it stands in a URL and in a cookie as it is"
    assert len(token) < tokens.TOKEN_MAX


@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_no_bit_of_it_can_be_another(at: int, bit: int) -> None:
    token = bytearray(tokens.sign(KEY, GRANT).encode())
    token[at % len(token)] ^= 1 << bit
    assert tokens.read(KEY, token.decode("latin-1")) in {None, GRANT}, "but for unused bits of its last character"
    assert at % len(token) == len(token) - 1 or tokens.read(KEY, token.decode("latin-1")) is None


@given(text=st.text(max_size=600))
def test_what_nobody_signed(text: str) -> None:
    assert tokens.read(KEY, text) is None
    assert tokens.read(KEY, tokens.PREFIX + text) is None


def test_a_token_of_the_time_before_links_had_ids_is_read() -> None:
    """Byte for byte as it was signed then."""
    given_out = (
        "pds_BtaYf2qhrZKzegvYKCPyW3Z7W0kcCX2HIMr-XvLDFsl0ZW5fZGVmYXVsdAp3c19hYWFhYWFhYWFhYWFhYWFhYW"
        "FhYWFhYWFhYQo4MDgwCjIwMDAwMDAwMDAKNw"
    )
    assert tokens.read(KEY, given_out) == GRANT and GRANT.link is None


def test_another_key_or_one_for_another_purpose() -> None:
    assert tokens.read(b"l" * 32, tokens.sign(KEY, GRANT)) is None
    assert tokens.read(KEY, tokens.sign(KEY, GRANT) * 9) is None


@pytest.mark.parametrize("to", [PortRef(WS, 8080), PortRef("demo", 8080), PortRef("demo", 8080, DEFAULT_TENANT)])
def test_it_counts_for_its_port(to: PortRef) -> None:
    assert judge(GRANT, to, "demo", SHARE, GRANT.until_s - 1) == SHARE


@pytest.mark.parametrize(
    ("to", "grant", "share", "now_s", "kind"),
    [
        (PortRef(WS, 8081), GRANT, SHARE, 0, ShareElsewhere),
        (PortRef("ws_" + "b" * 26, 8080), GRANT, SHARE, 0, ShareElsewhere),
        (PortRef("other", 8080), GRANT, SHARE, 0, ShareElsewhere),
        (PortRef("demo", 8080, DEFAULT_TENANT), replace(GRANT, tenant_id=TenantId("ten_x")), SHARE, 0, ShareElsewhere),
        (PortRef(WS, 8080), GRANT, None, 0, ShareRevoked),
        (PortRef(WS, 8080), GRANT, SHARE, GRANT.until_s, ShareExpired),
        (PortRef(WS, 8081), GRANT, None, GRANT.until_s, ShareElsewhere),
        (PortRef(WS, 8080), GRANT, None, GRANT.until_s, ShareRevoked),
    ],
)
def test_it_counts_for_nothing_else(
    to: PortRef, grant: Grant, share: Share | None, now_s: float, kind: type[PerdureError]
) -> None:
    with pytest.raises(kind):
        judge(grant, to, "demo", share, now_s)


def test_a_deleted_workspace_has_no_name_that_would_match() -> None:
    with pytest.raises(ShareElsewhere):
        judge(GRANT, PortRef("None", 8080), None, None, 0)
