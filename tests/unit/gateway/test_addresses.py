"""Address classes: the table agrees with the standard library's where that is sure, and no disguise makes an address public."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.gateway.addresses import AddressKind, classify

V4 = st.integers(0, 2**32 - 1).map(IPv4Address)
V6 = st.integers(0, 2**128 - 1).map(IPv6Address)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("8.8.8.8", AddressKind.PUBLIC),
        ("2606:4700::1111", AddressKind.PUBLIC),
        ("10.1.2.3", AddressKind.PRIVATE),
        ("172.31.255.255", AddressKind.PRIVATE),
        ("172.32.0.0", AddressKind.PUBLIC),
        ("192.168.0.1", AddressKind.PRIVATE),
        ("127.0.0.1", AddressKind.LOOPBACK),
        ("127.8.8.8", AddressKind.LOOPBACK),
        ("::1", AddressKind.LOOPBACK),
        ("169.254.1.1", AddressKind.LINK_LOCAL),
        ("fe80::1", AddressKind.LINK_LOCAL),
        ("100.64.0.1", AddressKind.SHARED),
        ("100.128.0.0", AddressKind.PUBLIC),
        ("169.254.169.254", AddressKind.METADATA),
        ("168.63.129.16", AddressKind.METADATA),
        ("fd00:ec2::254", AddressKind.METADATA),
        ("fd12::1", AddressKind.PRIVATE),
        ("224.0.0.1", AddressKind.MULTICAST),
        ("ff02::1", AddressKind.MULTICAST),
        ("0.0.0.0", AddressKind.UNSPECIFIED),
        ("::", AddressKind.UNSPECIFIED),
        ("255.255.255.255", AddressKind.RESERVED),
        ("4000::1", AddressKind.RESERVED),
        ("2001:db8::1", AddressKind.RESERVED),
        ("::ffff:8.8.8.8", AddressKind.EMBEDDED),
        ("::ffff:127.0.0.1", AddressKind.EMBEDDED),
        ("2002:7f00:1::", AddressKind.EMBEDDED),
        ("64:ff9b::8.8.8.8", AddressKind.PUBLIC),
        ("64:ff9b::10.0.0.1", AddressKind.PRIVATE),
        ("64:ff9b::169.254.169.254", AddressKind.METADATA),
    ],
)
def test_each_class_has_its_kind(text: str, kind: AddressKind) -> None:
    assert classify(ip_address(text)) is kind


def test_the_nodes_own_public_address_is_not_public() -> None:
    own = frozenset({ip_address("8.8.4.4"), ip_address("2606:4700::1")})
    assert classify(ip_address("8.8.4.4"), own) is AddressKind.OWN
    assert classify(ip_address("2606:4700::1"), own) is AddressKind.OWN
    assert classify(ip_address("64:ff9b::8.8.4.4"), own) is AddressKind.OWN


@given(V4 | V6)
def test_nothing_that_the_standard_library_calls_local_is_public(address: IPv4Address | IPv6Address) -> None:
    if address.is_private or address.is_loopback or address.is_link_local or address.is_multicast or address.is_unspecified:
        # NAT64 is judged by what is embedded; 192.0.0.9/10 and the like are not ours to open.
        assert classify(address) is not AddressKind.PUBLIC


@given(V4)
def test_an_ipv4_address_in_an_ipv6_disguise_is_never_more_than_itself(address: IPv4Address) -> None:
    number = int(address)
    for disguise in (IPv6Address(0xFFFF << 32 | number), IPv6Address(number), IPv6Address(0x2002 << 112 | number << 80)):
        assert classify(disguise) is not AddressKind.PUBLIC
    assert classify(IPv6Address((0x64FF9B << 96) | number)) is classify(address)


@given(V6)
def test_public_ipv6_lies_in_the_allocated_range_or_behind_nat64(address: IPv6Address) -> None:
    if classify(address) is AddressKind.PUBLIC:
        assert int(address) >> 125 == 1 or int(address) >> 32 == 0x64FF9B << 64
