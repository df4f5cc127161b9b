"""What an IP address is, as far as egress policy cares. Pure: tables from the IANA special-purpose registries (RFC 6890).

The tables are ours and not ``ipaddress.is_global``, whose answers change between Python releases. Anything that is not in a
table is public for IPv4, and for IPv6 only inside 2000::/3, the part IANA allocates from.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network


class AddressKind(StrEnum):
    """The values are words for sentences: "10.0.0.1 is a private address"."""

    PUBLIC = "public"
    PRIVATE = "private"
    LOOPBACK = "loopback"
    LINK_LOCAL = "link-local"
    SHARED = "carrier-grade NAT"
    METADATA = "cloud metadata"
    OWN = "node's own"
    EMBEDDED = "IPv4-in-IPv6"
    MULTICAST = "multicast"
    UNSPECIFIED = "unspecified"
    RESERVED = "reserved"


#: No connection can mean anything there, so no operator can open them.
NEVER = frozenset({AddressKind.MULTICAST, AddressKind.UNSPECIFIED, AddressKind.RESERVED})

#: Addresses at which clouds hand credentials to whoever asks: AWS, Azure, GCP, OpenStack (the first), AWS containers, Alibaba,
#: Oracle, Azure's wire server (inside a public range), AWS and GCP over IPv6.
_METADATA = frozenset(
    {
        *map(
            IPv4Address, ("169.254.169.254", "169.254.170.2", "169.254.170.23", "100.100.100.200", "192.0.0.192", "168.63.129.16")
        ),
        *map(IPv6Address, ("fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254")),
    }
)


def _table(*rows: tuple[str, AddressKind]) -> tuple[tuple[IPNetwork, AddressKind], ...]:
    return tuple((ip_network(text), kind) for text, kind in rows)


_V4 = _table(
    ("0.0.0.0/8", AddressKind.UNSPECIFIED),
    ("10.0.0.0/8", AddressKind.PRIVATE),
    ("100.64.0.0/10", AddressKind.SHARED),
    ("127.0.0.0/8", AddressKind.LOOPBACK),
    ("169.254.0.0/16", AddressKind.LINK_LOCAL),
    ("172.16.0.0/12", AddressKind.PRIVATE),
    ("192.0.0.0/24", AddressKind.RESERVED),
    ("192.0.2.0/24", AddressKind.RESERVED),
    ("192.88.99.0/24", AddressKind.RESERVED),
    ("192.168.0.0/16", AddressKind.PRIVATE),
    ("198.18.0.0/15", AddressKind.PRIVATE),
    ("198.51.100.0/24", AddressKind.RESERVED),
    ("203.0.113.0/24", AddressKind.RESERVED),
    ("224.0.0.0/4", AddressKind.MULTICAST),
    ("240.0.0.0/4", AddressKind.RESERVED),
)

_V6 = _table(
    ("::/128", AddressKind.UNSPECIFIED),
    ("::1/128", AddressKind.LOOPBACK),
    ("::/96", AddressKind.EMBEDDED),
    ("::ffff:0:0/96", AddressKind.EMBEDDED),
    ("64:ff9b:1::/48", AddressKind.EMBEDDED),
    ("2001::/32", AddressKind.EMBEDDED),  # Teredo
    ("2002::/16", AddressKind.EMBEDDED),  # 6to4
    ("fc00::/7", AddressKind.PRIVATE),
    ("fe80::/10", AddressKind.LINK_LOCAL),
    ("fec0::/10", AddressKind.PRIVATE),
    ("ff00::/8", AddressKind.MULTICAST),
    ("2001::/23", AddressKind.RESERVED),
    ("2001:db8::/32", AddressKind.RESERVED),
    ("3fff::/20", AddressKind.RESERVED),
)

_NAT64 = IPv6Network("64:ff9b::/96")
_ALLOCATED = IPv6Network("2000::/3")


def classify(address: IPAddress, own: Collection[IPAddress] = ()) -> AddressKind:
    """The kind of ``address``; ``own`` are the addresses of this node. An IPv6 scope id does not change the answer."""
    if address in _METADATA:
        return AddressKind.METADATA
    if isinstance(address, IPv4Address):
        return _lookup(address, _V4) or (AddressKind.OWN if address in own else AddressKind.PUBLIC)
    if address in _NAT64:
        # The well-known prefix of RFC 6052 leads to the IPv4 address in its last 32 bits, wherever that is.
        return classify(IPv4Address(int(address) & 0xFFFFFFFF), own)
    kind = _lookup(address, _V6)
    if kind is None and address not in _ALLOCATED:
        kind = AddressKind.RESERVED
    return kind or (AddressKind.OWN if address in own else AddressKind.PUBLIC)


def classify_network(network: IPNetwork) -> AddressKind | None:
    """The kind of all of its addresses; None when they are of several kinds, or public."""
    rows = _V4 if network.version == 4 else _V6
    first, last = network[0], network[-1]
    return next((kind for row, kind in rows if first in row and last in row), None)


def _lookup(address: IPAddress, table: tuple[tuple[IPNetwork, AddressKind], ...]) -> AddressKind | None:
    return next((kind for network, kind in table if address in network), None)
