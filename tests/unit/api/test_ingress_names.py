"""Addresses of ports lead to one workspace and one port, or to nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.api.ingress.names import Address, Domain, id_label, label_of, path_address, read_label, take_share
from perdure.core.errors import InvalidRequest, NotFound
from perdure.core.ids import NAME

WS = "ws_" + "01kabc" + "0" * 20
NAMES = st.from_regex(NAME, fullmatch=True)
DOMAIN = Domain.parse("ws.localhost")


@given(name=NAMES, port=st.integers(1, 65535))
def test_a_label_leads_back_to_its_name(name: str, port: int) -> None:
    label = label_of(name)
    if label is not None:
        assert read_label(f"{label}--{port}") == Address(name, port)
        assert len(f"{label}--{port}") <= 63 and "@" not in label


@given(one=NAMES, other=NAMES)
def test_no_two_names_have_one_label(one: str, other: str) -> None:
    assert one == other or label_of(one) is None or label_of(one) != label_of(other)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("demo", "demo"),
        ("my-app-2", "my-app-2"),
        ("demo@try", "demo--try"),
        ("demo@lost-20260102", "demo--lost-20260102"),
        ("a--b", None),
        ("a@b--c", None),
        ("a@b-", "a--b-"),
        ("x" * 50, "x" * 50),
        ("x" * 50 + "@" + "y" * 20, None),
        ("ws-" + "0" * 26, None),
        ("ws-short", "ws-short"),
    ],
)
def test_labels_of_names(name: str, label: str | None) -> None:
    assert NAME.fullmatch(name)
    assert label_of(name) == label


def test_an_id_always_has_one() -> None:
    assert id_label(WS) == WS.replace("_", "-")
    for label in (id_label(WS), WS):
        assert read_label(f"{label}--80") == Address(WS, 80, by_name=False)


@pytest.mark.parametrize(
    "label",
    [
        "",
        "demo",
        "demo-80",
        "demo--",
        "demo--0",
        "demo--65536",
        "demo--http",
        "demo--٣",
        "demo--+1",
        "--80",
        "a--b--c--80",
        "-a--80",
        "a---80",
        "a.b--80",
        "A--80",
        "a_b--80",
        "demo--80-",
        "demo--" + "9" * 40,
    ],
)
def test_labels_that_name_nothing(label: str) -> None:
    with pytest.raises(NotFound):
        read_label(label)


@pytest.mark.parametrize(
    ("text", "domain"),
    [
        ("ws.localhost", Domain("ws.localhost")),
        ("WS.Example.com", Domain("ws.example.com")),
        ("https://ws.example.com", Domain("ws.example.com", "https", 443)),
        ("https://ws.example.com:8443/", Domain("ws.example.com", "https", 8443)),
        ("http://ws.example.com", Domain("ws.example.com", "http", 80)),
    ],
)
def test_domains(text: str, domain: Domain) -> None:
    assert Domain.parse(text) == domain


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ws localhost",
        "ws.localhost:7070",
        "ftp://ws.localhost",
        "https://",
        "https://u@ws.x",
        "https://ws.x/y",
        "*.ws.x",
        ".ws.x",
        "http://[::1",
        "ws.x?y",
        "http://ws.x:99999",
        "ws..x",
        "-a.x",
    ],
)
def test_domains_that_are_none(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a domain for ports"):
        Domain.parse(text)


@pytest.mark.parametrize("host", ["demo--80.ws.localhost", "demo--80.ws.localhost:7070", "DEMO--80.WS.localhost"])
def test_hosts_below_the_domain(host: str) -> None:
    assert DOMAIN.address(host) == Address("demo", 80)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "localhost",
        "ws.localhost",
        "demo--80.ws.localhost.evil.example",
        "demo--80.xws.localhost",
        "127.0.0.1:7070",
        "demo--80.ws.localhost@127.0.0.1",
        "demo--80.ws.localhost:7070:1x",
        "[::1]:80",
    ],
)
def test_hosts_that_are_the_apis_affair(host: str) -> None:
    assert DOMAIN.address(host) is None


@pytest.mark.parametrize("host", ["demo.ws.localhost", "a.b--80.ws.localhost", ".ws.localhost", "demo--80@x.ws.localhost"])
def test_hosts_below_the_domain_that_name_nothing(host: str) -> None:
    with pytest.raises(NotFound):
        DOMAIN.address(host)


def test_urls() -> None:
    assert DOMAIN.url("demo", 80, 7070) == "http://demo--80.ws.localhost:7070/"
    assert DOMAIN.url("demo", 80, 80) == "http://demo--80.ws.localhost/"
    assert Domain.parse("https://ws.x").url("demo", 80, 7070) == "https://demo--80.ws.x/"
    assert Domain.parse("https://ws.x:8443").url("demo", 80, 7070) == "https://demo--80.ws.x:8443/"


@pytest.mark.parametrize(
    ("raw", "query", "found"),
    [
        (b"/v1/workspaces/demo/ports/80/", b"", ("demo", 80, b"/")),
        (b"/v1/workspaces/demo/ports/80/a/../b//c/%2e%2e/%2F", b"x=%00&y", ("demo", 80, b"/a/../b//c/%2e%2e/%2F?x=%00&y")),
        (b"/v1/workspaces/demo%40try/ports/80/../../..", b"", ("demo@try", 80, b"/../../..")),
        (b"/v1/workspaces/a%2Fb/ports/80/", b"", ("a/b", 80, b"/")),
        (b"/v1/workspaces/demo/ports/80//host/", b"", ("demo", 80, b"//host/")),
        (b"/v1/workspaces/demo/ports/80/v1/workspaces/x/ports/81/", b"", ("demo", 80, b"/v1/workspaces/x/ports/81/")),
    ],
)
def test_paths_are_taken_as_they_came(raw: bytes, query: bytes, found: tuple[str, int, bytes]) -> None:
    address = path_address(raw, query)
    assert address is not None and (address.ref, address.port, address.target) == found
    assert raw.startswith(address.prefix.encode()) and address.prefix.endswith(f"/ports/{found[1]}")


@pytest.mark.parametrize(
    "raw",
    [
        b"/v1/workspaces/demo/ports/80",
        b"/v1/workspaces/demo/ports/x/",
        b"/v1/workspaces/demo%2Fports%2F80/",
        b"/V1/workspaces/d/ports/80/",
        b"/v1/workspaces//ports/80/",
        b"/v1/workspaces/a/b/ports/80/",
        b"/%761/workspaces/demo/ports/80/",
        b"//v1/workspaces/d/ports/80/",
    ],
)
def test_paths_that_are_the_apis_affair(raw: bytes) -> None:
    assert path_address(raw, b"") is None


@pytest.mark.parametrize("port", [b"0", b"65536", b"00000080", b"9" * 400])
def test_paths_with_no_port(port: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not a TCP port"):
        path_address(b"/v1/workspaces/demo/ports/" + port + b"/", b"")


@pytest.mark.parametrize(
    ("query", "token", "rest"),
    [
        (b"", None, b""),
        (b"a=1&&b", None, b"a=1&&b"),
        (b"perdure_share=t", "t", b""),
        (b"a=%20&perdure_share=t&b=;&=", "t", b"a=%20&b=;&="),
        (b"perdure_share=one&perdure_share=two", "two", b""),
        (b"perdure_share=", "", b""),
        (b"xperdure_share=t&perdure_shared=u", None, b"xperdure_share=t&perdure_shared=u"),
        (b"perdure%5Fshare=t", None, b"perdure%5Fshare=t"),
    ],
)
def test_the_token_goes_out_of_the_query(query: bytes, token: str | None, rest: bytes) -> None:
    assert take_share(query) == (token, rest)
