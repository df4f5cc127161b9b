"""Egress rules: what an entry covers, what is refused and why, and one sentence for each mistake."""

from __future__ import annotations

from ipaddress import IPv4Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.errors import InvalidRequest
from perdure.gateway.addresses import AddressKind, classify
from perdure.gateway.rules import EgressRules, Policy, parse_host

PUBLIC = ip_address("93.184.216.34")


def refusal(host: str, address: str, port: int, allow: list[str], operator: list[str] | None = None, own: str = "") -> str | None:
    policy = Policy(EgressRules.parse(allow), EgressRules.parse(operator or []), {ip_address(own)} if own else ())
    return policy.refuses(parse_host(host), ip_address(address), port)


@pytest.mark.parametrize(
    ("entry", "host", "address", "port", "covered"),
    [
        ("example.org:443", "example.org", "93.184.216.34", 443, True),
        ("EXAMPLE.org.:443", "Example.ORG.", "93.184.216.34", 443, True),
        ("bücher.example:443", "xn--bcher-kva.example", "93.184.216.34", 443, True),
        ("example.org:443", "example.org", "93.184.216.34", 80, False),
        ("example.org:443", "www.example.org", "93.184.216.34", 443, False),
        ("example.org:443", "evilexample.org", "93.184.216.34", 443, False),
        ("*.example.org:443", "a.b.example.org", "93.184.216.34", 443, True),
        ("*.example.org:443", "example.org", "93.184.216.34", 443, False),
        ("*.example.org:443", "notexample.org", "93.184.216.34", 443, False),
        ("93.184.216.34:443", "93.184.216.34", "93.184.216.34", 443, True),
        ("93.184.216.34:443", "any.name", "93.184.216.34", 443, True),
        ("93.184.216.0/24:443", "any.name", "93.184.216.34", 443, True),
        ("93.184.216.0/24:443", "any.name", "93.184.217.34", 443, False),
        ("[2606:4700::]/32:443", "", "2606:4700::1", 443, None),
        ("[2606:4700::/32]:443", "any.name", "2606:4700::1", 443, True),
        ("[2606:4700::1]:443", "2606:4700::1", "2606:4700::1", 443, True),
        ("0.0.0.0/0:443", "any.name", "2606:4700::1", 443, False),
    ],
)
def test_an_entry_covers_exactly_what_it_says(entry: str, host: str, address: str, port: int, covered: bool | None) -> None:
    if covered is None:
        with pytest.raises(InvalidRequest):
            EgressRules.parse([entry])
        return
    assert (refusal(host, address, port, [entry]) is None) is covered


def test_nothing_listed_is_nothing_allowed() -> None:
    assert refusal("example.org", "93.184.216.34", 443, []) == (
        "example.org:443 is refused: it is not on this workspace's allow list "
        "(create the workspace with --allow example.org:443)."
    )


def test_image_and_workspace_lists_are_a_union() -> None:
    rules = EgressRules.parse(["a.example:443"]) | EgressRules.parse(["b.example:443"])
    assert all(Policy(rules).refuses(host, PUBLIC, 443) is None for host in ("a.example", "b.example"))


@pytest.mark.parametrize(
    "bad",
    [
        "example.org",
        "",
        ":443",
        "example.org:",
        "example.org:0",
        "example.org:65536",
        "example.org:https",
        "exa mple.org:443",
        "-x.org:443",
        "a..org:443",
        "*:443",
        "*.org:443",
        "w*.example.org:443",
        "*.10.0.0.1:443",
        "10.0.0.0/33:443",
        "10.0.0.1/8:443",
        "2001:db8::1:443",
        "[example.org]:443",
        "[10.0.0.1]:443",
        "2130706433:80",
        "127.1:80",
        "0x7f000001:80",
        "[fe80::1%eth0]:80",
        "http://example.org:443",
        f"{'a' * 64}.org:443",
        f"{'a.' * 130}org:443",
        "ex\x00ample.org:443",
    ],
)
def test_a_bad_entry_is_named_in_one_sentence(bad: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        EgressRules.parse(["good.example:443", bad])
    assert repr(bad)[:40].strip("'") in caught.value.message
    assert caught.value.message.endswith(".")
    assert "HOST:PORT" in caught.value.hint


def test_too_many_entries_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="more than the 1000"):
        EgressRules.parse([f"h{n}.example:443" for n in range(1001)])


@pytest.mark.parametrize(
    ("address", "word"),
    [
        ("10.0.0.5", "private"),
        ("127.0.0.1", "loopback"),
        ("169.254.3.4", "link-local"),
        ("100.64.0.1", "carrier-grade NAT"),
        ("::1", "loopback"),
        ("fd12::1", "private"),
        ("::ffff:10.0.0.5", "IPv4-in-IPv6"),
        ("8.8.4.4", "node's own"),
    ],
)
def test_what_is_not_public_needs_the_operator_too(address: str, word: str) -> None:
    name = ["in.example:80"]
    said = refusal("in.example", address, 80, name, own="8.8.4.4")
    assert said is not None
    assert f"{ip_address(address)} is a {word} address" in said
    assert refusal("in.example", address, 80, name, name, own="8.8.4.4") is None
    assert refusal("in.example", address, 80, [], name, own="8.8.4.4") is not None
    assert refusal("in.example", address, 80, name, ["in.example:81"], own="8.8.4.4") is not None


def test_an_allowed_name_cannot_be_pointed_at_an_address_opened_for_others() -> None:
    assert refusal("evil.example", "127.0.0.1", 8080, ["evil.example:8080"], ["127.0.0.1:8080"]) is not None
    assert refusal("127.0.0.1", "127.0.0.1", 8080, ["127.0.0.1:8080"], ["127.0.0.1:8080"]) is None


@pytest.mark.parametrize("operator", ["meta.example:80", "169.254.0.0/16:80"])
def test_metadata_needs_its_exact_address(operator: str) -> None:
    allow = ["meta.example:80", "169.254.0.0/16:80"]
    assert refusal("meta.example", "169.254.169.254", 80, allow, [operator]) is not None
    assert refusal("meta.example", "169.254.169.254", 80, allow, [operator, "169.254.169.254:80"]) is None


@pytest.mark.parametrize("address", ["0.0.0.0", "224.0.0.1", "255.255.255.255", "ff02::1"])
def test_what_means_nothing_is_refused_even_to_operators(address: str) -> None:
    every = ["0.0.0.0/0:80", "[::/0]:80"]
    assert refusal("x.example", address, 80, every, every) is not None


@given(st.integers(0, 2**32 - 1).map(IPv4Address), st.integers(1, 65535))
def test_everything_allowed_is_still_only_what_is_public(address: IPv4Address, port: int) -> None:
    rules = EgressRules.parse([f"0.0.0.0/0:{port}"])
    allowed = Policy(rules).refuses("x.example", address, port) is None
    assert allowed is (classify(address) is AddressKind.PUBLIC)


@given(st.text(max_size=80))
def test_any_text_is_an_entry_or_an_invalid_request(text: str) -> None:
    try:
        EgressRules.parse([text])
    except InvalidRequest as error:
        assert error.message


@given(st.text(max_size=80))
def test_a_canonical_host_stays_itself(text: str) -> None:
    try:
        host = parse_host(text)
    except InvalidRequest:
        return
    assert parse_host(str(host)) == host


@pytest.mark.parametrize(
    ("entry", "found", "operator", "said"),
    [
        ("db.example:80", ["93.184.216.34"], "", None),
        ("db.example:80", [], "", None),
        ("db.example:80", ["10.0.0.5", "93.184.216.34"], "", None),
        ("db.example:80", ["10.0.0.5"], "", "db.example:80 is refused: 10.0.0.5 is a private address, which the operator must"),
        ("db.example:80", ["10.0.0.5"], "db.example:80", None),
        ("db.example:80", ["10.0.0.5"], "db.example:81", "(PERDURE_EGRESS_PRIVATE_ALLOW=db.example:80)"),
        ("*.in.example:80", [], "", None),
        ("127.0.0.1:80", [], "", "127.0.0.1:80 is refused: 127.0.0.1 is a loopback address"),
        ("127.0.0.1:80", [], "127.0.0.0/8:80", None),
        ("[fd12::1]:80", [], "", "(PERDURE_EGRESS_PRIVATE_ALLOW=[fd12::1]:80)"),
        ("169.254.169.254:80", [], "169.254.0.0/16:80", "by exactly 169.254.169.254:80"),
        ("8.8.4.4:80", [], "", "8.8.4.4 is a node's own address"),
        ("0.0.0.0/0:80", [], "", None),
        ("93.184.216.0/24:80", [], "", None),
        ("10.0.0.0/8:80", [], "", "(PERDURE_EGRESS_PRIVATE_ALLOW=10.0.0.0/8:80)"),
        ("10.0.0.0/8:80", [], "10.1.2.3:80", None),
        ("10.1.0.0/16:80", [], "10.0.0.0/8:80", None),
        ("[fd00::/8]:80", [], "10.0.0.0/8:80", "[fd00::/8]:80 is refused: these are private addresses"),
        ("224.0.0.0/8:80", [], "224.0.0.0/8:80", "to which no workspace connects"),
    ],
)
def test_an_entry_that_leads_nowhere_is_known_before_anybody_tries(
    entry: str, found: list[str], operator: str, said: str | None
) -> None:
    rules = EgressRules.parse([entry])
    policy = Policy(rules, EgressRules.parse([operator] if operator else []), {ip_address("8.8.4.4")})
    (parsed,) = rules.entries
    refusal = policy.refuses_all(parsed, [ip_address(one) for one in found])
    assert refusal is None if said is None else refusal is not None and said in refusal
