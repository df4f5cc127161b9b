"""Egress rules: who a workspace may connect to. Pure; the dialer in ``egress`` asks them after it has resolved the name.

An entry is one of

* ``example.org:443``: this name;
* ``*.example.org:443``: every name below it, at any depth, not itself;
* ``192.0.2.7:443``, ``[2001:db8::7]:443``: this address, given as such or found by resolving any name;
* ``192.0.2.0/24:443``, ``[2001:db8::/32]:443``: every address in that network, likewise.

Nothing listed is nothing allowed. An address that is not public needs the same (host, port) in the operator's list too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address, ip_network

from perdure.core.errors import InvalidRequest
from perdure.gateway.addresses import NEVER, AddressKind, IPAddress, IPNetwork, classify, classify_network

MAX_ENTRIES = 1000
_LABEL = re.compile(r"^[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?$")
_SHAPE = re.compile(r"^(?:\[(?P<v6>[^\[\]]*)\]|(?P<host>[^\[\]:]*)):(?P<port>[0-9]{1,5})$")
_HINT = "Write HOST:PORT, such as example.org:443, *.example.org:443, 192.0.2.7:443, 192.0.2.0/24:443 or [2001:db8::7]:443."


def parse_host(text: str) -> str | IPAddress:
    """The canonical form of a host as programs write it: a lower-case ASCII name without its final dot, or an address.

    Raises InvalidRequest. Spellings that only old resolvers take for addresses (``127.1``, ``0x7f000001``, ``2130706433``) are
    refused, so that a rule and the resolver never read the same text differently.
    """
    try:
        address = ip_address(text)
    except ValueError:
        return _parse_name(text)
    if isinstance(address, IPv6Address) and address.scope_id:
        raise InvalidRequest(f"{text!r} names a network interface of the node, which a workspace cannot use.", hint=_HINT)
    return address


def _parse_name(text: str) -> str:
    name = text.lower().removesuffix(".")
    if not name.isascii():
        try:
            name = name.encode("idna").decode("ascii")
        except UnicodeError:
            raise InvalidRequest(f"{text!r} is not a host name: it has no ASCII form.", hint=_HINT) from None
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.match(label) for label in labels):
        raise InvalidRequest(f"{text[:100]!r} is not a host name or an address.", hint=_HINT)
    last = labels[-1]
    if last.isdigit() or re.fullmatch(r"0x[0-9a-f]*", last):
        raise InvalidRequest(f"{text!r} is neither a name nor a complete address: names do not end in a number.", hint=_HINT)
    return name


@dataclass(frozen=True, slots=True)
class Entry:
    """One allowed destination. Exactly one of ``name``, ``suffix`` (with its leading dot) and ``network`` is set."""

    port: int
    name: str | None = None
    suffix: str | None = None
    network: IPNetwork | None = None

    def covers_name(self, host: str | IPAddress, port: int) -> bool:
        if port != self.port or not isinstance(host, str):
            return False
        return host == self.name or (self.suffix is not None and host.endswith(self.suffix))

    def covers_address(self, address: IPAddress, port: int) -> bool:
        return port == self.port and self.network is not None and address in self.network

    @property
    def is_single_address(self) -> bool:
        return self.network is not None and self.network.num_addresses == 1


def parse_entry(text: str) -> Entry:
    """Raises InvalidRequest with the entry and what is wrong with it."""
    shape = _SHAPE.match(text.strip())
    if shape is None:
        problem = "has no port" if ":" not in text else "is not HOST:PORT"
        raise InvalidRequest(f"Egress entry {text!r} {problem}.", hint=_HINT)
    port = int(shape["port"])
    if not 1 <= port <= 65535:
        raise InvalidRequest(f"Egress entry {text!r}: port {port} is not between 1 and 65535.", hint=_HINT)
    host = shape["v6"] if shape["v6"] is not None else shape["host"]
    try:
        return _entry(host, port, bracketed=shape["v6"] is not None)
    except InvalidRequest as error:
        raise InvalidRequest(f"Egress entry {text!r}: {error.message}", hint=_HINT) from None


def _entry(host: str, port: int, *, bracketed: bool) -> Entry:
    if "/" in host:
        try:
            network = ip_network(host)
        except ValueError as error:
            raise InvalidRequest(f"{error}.") from None
        _check_brackets(network.version, bracketed=bracketed)
        return Entry(port, network=network)
    if host.startswith("*."):
        suffix = parse_host(host[2:])
        if not isinstance(suffix, str) or "." not in suffix:
            raise InvalidRequest("a wildcard needs a domain of at least two labels after '*.'.")
        return Entry(port, suffix="." + suffix)
    if "*" in host:
        raise InvalidRequest("'*' stands only for whole labels at the start; every public address is 0.0.0.0/0 and [::/0].")
    parsed = parse_host(host)
    if isinstance(parsed, str):
        _check_brackets(4, bracketed=bracketed)
        return Entry(port, name=parsed)
    _check_brackets(parsed.version, bracketed=bracketed)
    return Entry(port, network=ip_network(parsed))


def _check_brackets(version: int, *, bracketed: bool) -> None:
    if bracketed != (version == 6):
        raise InvalidRequest("IPv6 addresses, and only they, are written in brackets.")


@dataclass(frozen=True, slots=True)
class EgressRules:
    """An allow list. ``|`` is the union of an image's and a workspace's. Empty denies everything."""

    entries: frozenset[Entry] = field(default=frozenset())

    @classmethod
    def parse(cls, entries: Iterable[str]) -> EgressRules:
        """Raises InvalidRequest naming the first bad entry."""
        parsed = frozenset(parse_entry(text) for text in entries)
        if len(parsed) > MAX_ENTRIES:
            raise InvalidRequest(f"{len(parsed)} egress entries are more than the {MAX_ENTRIES} a workspace may have.")
        return cls(parsed)

    def __or__(self, other: EgressRules) -> EgressRules:
        return EgressRules(self.entries | other.entries)

    def could_allow(self, host: str | IPAddress, port: int) -> bool:
        """Whether any address could make this allowed; when not, the name is not even looked up (DNS is a way out too)."""
        if not isinstance(host, str):
            return self.covers_address(host, port)
        return self.covers_name(host, port) or any(e.port == port and e.network is not None for e in self.entries)

    def covers_name(self, host: str | IPAddress, port: int) -> bool:
        return any(entry.covers_name(host, port) for entry in self.entries)

    def covers_address(self, address: IPAddress, port: int) -> bool:
        return any(entry.covers_address(address, port) for entry in self.entries)

    def touches(self, network: IPNetwork, port: int) -> bool:
        """Whether an entry covers any address of that network."""
        covered = [e.network for e in self.entries if e.port == port and e.network is not None]
        return any(one[0] in network or network[0] in one for one in covered)

    def names_exactly(self, address: IPAddress, port: int) -> bool:
        """Whether an entry is this one address and port, not a network that happens to contain it."""
        return any(e.is_single_address and e.covers_address(address, port) for e in self.entries)


NOTHING = EgressRules()


@dataclass(frozen=True, slots=True)
class Policy:
    """What decides one connection: the workspace's rules, the operator's list for what is not public, the node's addresses.

    For an address that is not public, both lists must mean the same thing by it: both the name, or both the address. Otherwise
    the owner of an allowed name could point it at an address that the operator opened for another workspace.
    """

    rules: EgressRules
    operator: EgressRules = NOTHING
    own: Collection[IPAddress] = ()
    setting: str = "PERDURE_EGRESS_PRIVATE_ALLOW"  # where the operator's list is, for sentences

    def refuses(self, host: str | IPAddress, address: IPAddress, port: int) -> str | None:
        """None when allowed, otherwise the reason as a sentence. ``host`` as asked for, ``address`` what it resolved to."""
        by_name, by_address = self.rules.covers_name(host, port), self.rules.covers_address(address, port)
        if not (by_name or by_address):
            return not_allowed(host, port)
        kind = classify(address, self.own)
        if kind is AddressKind.PUBLIC:
            return None
        why = f"{show(host)}:{port} is refused: {address} is a {kind} address, "
        if kind in NEVER:
            return why + _NOBODY
        # A metadata service hands out the node's credentials: only an operator who wrote that very address means it.
        if kind is AddressKind.METADATA:
            granted = by_address and self.operator.names_exactly(address, port)
            return None if granted else why + f"which the operator must allow by exactly {show(address)}:{port}."
        granted = (by_name and self.operator.covers_name(host, port)) or (
            by_address and self.operator.covers_address(address, port)
        )
        return None if granted else why + self._operator_too(f"{show(host)}:{port}")

    def refuses_all(self, entry: Entry, found: Collection[IPAddress]) -> str | None:
        """Why nothing gets through that this entry of the rules allows; None when something may. ``found``: where its name
        leads. What lies below a wildcard is not known."""
        network = entry.network
        if network is not None and not entry.is_single_address:
            return self._refuses_network(network, entry.port)
        host = entry.name if network is None else network[0]
        if host is None:
            return None
        refusals = [self.refuses(host, address, entry.port) for address in (found if isinstance(host, str) else (host,))]
        return next(iter(refusals), None) if all(refusals) else None

    def _refuses_network(self, network: IPNetwork, port: int) -> str | None:
        kind = classify_network(network)
        if kind is None:
            return None
        where = f"[{network}]:{port}" if network.version == 6 else f"{network}:{port}"
        why = f"{where} is refused: these are {kind} addresses, "
        if kind in NEVER:
            return why + _NOBODY
        return None if self.operator.touches(network, port) else why + self._operator_too(where)

    def _operator_too(self, where: str) -> str:
        return f"which the operator must allow too ({self.setting}={where})."


_NOBODY = "to which no workspace connects."


def not_allowed(host: str | IPAddress, port: int) -> str:
    """The sentence for a destination that is on no list."""
    where = f"{show(host)}:{port}"
    return f"{where} is refused: it is not on this workspace's allow list (create the workspace with --allow {where})."


def show(host: str | IPAddress) -> str:
    """A host as it stands before ``:PORT``."""
    return f"[{host}]" if isinstance(host, IPv6Address) else str(host)
