"""Whose word about a client counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.api.proxies import client_of, is_of, networks
from perdure.core.errors import InvalidRequest

PROXIES = networks(["10.0.0.0/8", "2001:db8::1"])


@pytest.mark.parametrize(
    ("peer", "chain", "client"),
    [
        ("203.0.113.9", "198.51.100.1", "203.0.113.9"),  # no proxy of ours: whatever it says
        ("10.0.0.2", "203.0.113.9", "203.0.113.9"),
        ("10.0.0.2", "6.6.6.6, 203.0.113.9", "203.0.113.9"),  # what the client put there itself comes before
        ("10.0.0.2", "6.6.6.6, 203.0.113.9 , 10.0.0.3", "203.0.113.9"),  # two proxies in a row
        ("2001:db8::1", "2001:db8::2", "2001:db8::2"),
        ("::ffff:10.0.0.2", "203.0.113.9", "203.0.113.9"),
        ("10.0.0.2", "10.0.0.3, 10.0.0.4", "10.0.0.3"),
        ("10.0.0.2", "", "10.0.0.2"),
        ("10.0.0.2", "203.0.113.9, unknown", "10.0.0.2"),
        ("10.0.0.2", "<script>", "10.0.0.2"),
        ("10.0.0.2", "203.0.113.9:1234", "10.0.0.2"),
    ],
)
def test_the_nearest_that_is_no_proxy_of_ours(peer: str, chain: str, client: str) -> None:
    assert client_of(peer, chain, PROXIES) == client


@given(chain=st.text(max_size=200))
def test_whatever_stands_there_a_client_is_an_address(chain: str) -> None:
    found = client_of("10.0.0.2", chain, PROXIES)
    assert found == "10.0.0.2" or is_of(found, networks(["0.0.0.0/0", "::/0"]))


@given(chain=st.text(max_size=200))
def test_nobody_else_can_say_that_he_is_another(chain: str) -> None:
    assert client_of("203.0.113.9", chain, PROXIES) == "203.0.113.9"
    assert client_of("203.0.113.9", chain, ()) == "203.0.113.9"


@pytest.mark.parametrize("text", ["proxy.example", "10.0.0.1/8", "10.0.0.0/33", "", "10.0.0"])
def test_what_is_no_network_is_told(text: str) -> None:
    with pytest.raises(InvalidRequest, match="PERDURE_TRUSTED_PROXIES"):
        networks([text])
