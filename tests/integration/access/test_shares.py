"""Shares of ports in a real database, over the real workspace service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from perdure.access import shares, tokens
from perdure.access.model import LOCAL, Principal
from perdure.access.shares import NotShared, PortRef, ShareElsewhere, ShareExpired, ShareRevoked, ShareService
from perdure.core.errors import Conflict, NotFound
from perdure.core.ids import DEFAULT_TENANT, TenantId
from perdure.core.paging import Page, Place
from perdure.core.scopes import KeyScope
from perdure.journal.entries import Journal
from perdure.workspaces.model import Workspace
from tests.fakes.control_plane import CTX, ControlPlane, control_plane

OTHER = Principal("stranger", TenantId("ten_other"), frozenset({KeyScope.ADMIN}))
KEY = b"k" * 32


class Shared:
    def __init__(self, plane: ControlPlane, workspace: Workspace) -> None:
        self.plane = plane
        self.workspace = workspace
        self.service = ShareService(plane.database, KEY, plane.clock)

    @property
    def to(self) -> PortRef:
        return PortRef(self.workspace.id, 80)

    async def token(self, **options: float) -> str:
        return (await self.service.share(LOCAL, "demo", 80, **{"expires_s": 60, **options})).token


@pytest.fixture
async def shared() -> AsyncIterator[Shared]:
    async with control_plane() as plane:
        workspace, _ = await plane.create()
        yield Shared(plane, workspace)


async def test_a_link_from_its_making_to_its_end(shared: Shared) -> None:
    token = await shared.token()
    for to in (shared.to, PortRef("demo", 80), PortRef("demo", 80, DEFAULT_TENANT)):
        share = await shared.service.admit(token, to)
        assert (share.workspace_id, share.tenant_id, share.port) == (shared.workspace.id, DEFAULT_TENANT, 80)
        assert not share.is_public and share.shared_by == "local"
    shared.plane.database.shift_clock(59)
    await shared.service.admit(token, shared.to)
    shared.plane.database.shift_clock(62)
    with pytest.raises(ShareExpired):
        await shared.service.admit(token, shared.to)


async def test_a_later_link_leaves_earlier_ones_as_they_are(shared: Shared) -> None:
    long, short = await shared.token(expires_s=600), await shared.token(expires_s=60)
    (share,) = await shared.service.shared(LOCAL, "demo")
    until = share.links_until
    shared.plane.database.shift_clock(120)
    await shared.service.admit(long, shared.to)
    with pytest.raises(ShareExpired):
        await shared.service.admit(short, shared.to)
    await shared.token(expires_s=1)
    assert (await shared.service.shared(LOCAL, "demo"))[0].links_until == until


async def test_what_is_taken_back_never_counts_again(shared: Shared) -> None:
    token = await shared.token()
    await shared.service.unshare(LOCAL, "demo", 80)
    with pytest.raises(ShareRevoked):
        await shared.service.admit(token, shared.to)
    renewed = await shared.token()
    with pytest.raises(ShareRevoked):
        await shared.service.admit(token, shared.to)
    await shared.service.admit(renewed, shared.to)
    await shared.service.unshare(LOCAL, "demo", 80)
    with pytest.raises(NotFound, match="Port 80 of 'demo' is not shared"):
        await shared.service.unshare(LOCAL, "demo", 80)
    assert await shared.service.shared(LOCAL, "demo") == []


async def test_tokens_of_another_server_or_of_another_port(shared: Shared) -> None:
    foreign = ShareService(shared.plane.database, b"f" * 32, shared.plane.clock)
    with pytest.raises(NotShared):
        await shared.service.admit((await foreign.share(LOCAL, "demo", 80, expires_s=60)).token, shared.to)
    token = await shared.token()
    for to in (PortRef(shared.workspace.id, 81), PortRef("absent", 80), PortRef("demo", 80, TenantId("ten_other"))):
        with pytest.raises(ShareElsewhere):
            await shared.service.admit(token, to)


async def test_a_public_port_by_id_and_by_name(shared: Shared) -> None:
    await shared.service.publish(LOCAL, "demo", 80)
    for to, there in (
        (shared.to, True),
        (PortRef("demo", 80, DEFAULT_TENANT), True),
        (PortRef("demo", 80, TenantId("ten_other")), False),
        (PortRef("demo", 80), False),
        (PortRef(shared.workspace.id, 81), False),
    ):
        assert (await shared.service.public(to) is not None) is there, to
    token = await shared.token()
    (share,) = await shared.service.shared(LOCAL, "demo")
    assert share.is_public and share.links_until is not None
    await shared.service.unshare(LOCAL, "demo", 80)
    assert await shared.service.public(shared.to) is None
    with pytest.raises(ShareRevoked):
        await shared.service.admit(token, shared.to)


async def test_another_tenant_finds_nothing(shared: Shared) -> None:
    link = (await shared.service.share(LOCAL, "demo", 80, expires_s=60)).link
    for ref in ("demo", shared.workspace.id):
        with pytest.raises(NotFound, match="There is no workspace"):
            await shared.service.share(OTHER, ref, 80, expires_s=60)
        with pytest.raises(NotFound, match="There is no workspace"):
            await shared.service.unshare(OTHER, ref, 80)
        with pytest.raises(NotFound, match="There is no workspace"):
            await shared.service.shared(OTHER, ref)
        with pytest.raises(NotFound, match="There is no workspace"):
            await shared.service.revoke(OTHER, ref, link.id)
        assert await shared.service.links(OTHER, ref) == []
    assert len(await shared.service.shared(LOCAL, "demo")) == 1


async def test_a_deleted_workspace_is_shared_no_more(shared: Shared) -> None:
    token = await shared.token()
    await shared.service.publish(LOCAL, "demo", 80)
    await shared.plane.service.delete(CTX, "demo")
    with pytest.raises(ShareRevoked):
        await shared.service.admit(token, shared.to)
    assert await shared.service.public(shared.to) is None
    with pytest.raises(NotFound):
        await shared.service.shared(LOCAL, "demo")
    await shared.plane.create()
    with pytest.raises(ShareElsewhere):
        await shared.service.admit(token, PortRef("demo", 80))


async def test_forks_and_rewinds(shared: Shared) -> None:
    token = await shared.token()
    snapshot = await shared.plane.service.checkpoint(CTX, "demo")
    (branch,) = await shared.plane.service.fork(CTX, "demo", 1, names=("branch",))
    assert isinstance(branch, Workspace)
    with pytest.raises(ShareElsewhere):
        await shared.service.admit(token, PortRef(branch.id, 80))
    await shared.plane.service.rewind(CTX, "demo", snapshot.id)
    await shared.service.admit(token, shared.to)


async def test_the_thread_says_who_let_others_in(shared: Shared) -> None:
    link = (await shared.service.share(LOCAL, "demo", 80, expires_s=90)).link
    await shared.service.publish(LOCAL, "demo", 81)
    second = (await shared.service.share(LOCAL, "demo", 80, expires_s=90)).link
    await shared.service.revoke(LOCAL, "demo", link.id)
    await shared.service.unshare(LOCAL, "demo", 80)
    entries = await shared.plane.service.log(CTX, "demo")
    told = [(entry.kind, dict(entry.body)) for entry in entries if "shared" in entry.kind or "link" in entry.kind]
    assert told == [
        ("port-shared", {"port": 80, "by": "local", "link": link.id, "expires_s": 90}),
        ("port-shared", {"port": 81, "by": "local", "public": True}),
        ("port-shared", {"port": 80, "by": "local", "link": second.id, "expires_s": 90}),
        ("link-revoked", {"port": 80, "by": "local", "link": link.id}),
        ("port-unshared", {"port": 80, "by": "local"}),
    ]
    assert entries[-1].generation == shared.workspace.generation
    links = await Journal(shared.plane.database).read(DEFAULT_TENANT, shared.workspace.id, after_seq=0, limit=100)
    assert [entry.seq for entry in links] == list(range(1, len(links) + 1))


async def test_many_at_once_share_one_series(shared: Shared) -> None:
    tokens = await asyncio.gather(*(shared.token() for _ in range(10)), *(shared.plane.service.checkpoint(CTX, "demo"),))
    for token in tokens[:-1]:
        await shared.service.admit(str(token), shared.to)
    assert len(await shared.service.shared(LOCAL, "demo")) == 1


# ---------------------------------------------------------------------------------------------------------------- single links


async def test_one_link_is_taken_back_and_the_others_count(shared: Shared) -> None:
    first, second = [await shared.service.share(LOCAL, "demo", 80, expires_s=seconds) for seconds in (600, 60)]
    assert [one.id for one in await shared.service.links(LOCAL, "demo")] == [first.link.id, second.link.id]
    await shared.service.revoke(LOCAL, "demo", first.link.id)
    with pytest.raises(ShareRevoked):
        await shared.service.admit(first.token, shared.to)
    assert (await shared.service.admit(second.token, shared.to)).links_until == second.link.until, "links end sooner now"
    with pytest.raises(NotFound, match="that counts"):
        await shared.service.revoke(LOCAL, "demo", first.link.id)
    third = await shared.service.share(LOCAL, "demo", 80, expires_s=60)
    with pytest.raises(ShareRevoked):
        await shared.service.admit(first.token, shared.to)
    await shared.service.admit(third.token, shared.to)


async def test_with_its_last_link_a_port_is_private_again(shared: Shared) -> None:
    link = await shared.service.share(LOCAL, "demo", 80, expires_s=60)
    await shared.service.revoke(LOCAL, "demo", link.link.id)
    assert await shared.service.shared(LOCAL, "demo") == []
    open_to_all = await shared.service.share(LOCAL, "demo", 81, expires_s=60)
    await shared.service.publish(LOCAL, "demo", 81)
    await shared.service.revoke(LOCAL, "demo", open_to_all.link.id)
    (share,) = await shared.service.shared(LOCAL, "demo")
    assert (share.port, share.is_public, share.links_until) == (81, True, None)


async def test_links_that_have_ended_are_not_listed_and_go(shared: Shared) -> None:
    short = await shared.service.share(LOCAL, "demo", 80, expires_s=60)
    long = await shared.service.share(LOCAL, "demo", 80, expires_s=600)
    shared.plane.database.shift_clock(120)
    assert [one.id for one in await shared.service.links(LOCAL, "demo")] == [long.link.id]
    with pytest.raises(NotFound, match="that counts"):
        await shared.service.revoke(LOCAL, "demo", short.link.id)
    await shared.token()  # sweeps
    with pytest.raises(ShareExpired):
        await shared.service.admit(short.token, shared.to)


async def test_links_by_port_and_in_pages(shared: Shared) -> None:
    made = [(await shared.service.share(LOCAL, "demo", port, expires_s=60)).link for port in (80, 81, 80, 80)]
    assert [one.id for one in await shared.service.links(LOCAL, "demo", 80)] == [made[0].id, made[2].id, made[3].id]
    assert [one.port for one in await shared.service.links(LOCAL, "demo")] == [80, 81, 80, 80]
    seen, after = [], None
    while len(found := await shared.service.links(LOCAL, "demo", None, Page(1, after))) > 1:
        seen.append(found[0])
        after = Place(found[0].made_at, found[0].id)
    assert [*seen, *found] == made


async def test_what_is_unshared_has_no_links_left(shared: Shared) -> None:
    first = await shared.service.share(LOCAL, "demo", 80, expires_s=60)
    await shared.service.unshare(LOCAL, "demo", 80)
    assert await shared.service.links(LOCAL, "demo") == []
    await shared.token()
    with pytest.raises(ShareRevoked):
        await shared.service.admit(first.token, shared.to)


async def test_a_link_of_the_time_before_links_had_ids_counts_as_long_as_its_series(shared: Shared) -> None:
    made = await shared.service.share(LOCAL, "demo", 80, expires_s=60)
    grant = tokens.read(KEY, made.token)
    assert grant is not None
    older = tokens.sign(KEY, replace(grant, link=None))
    await shared.service.admit(older, shared.to)
    await shared.service.unshare(LOCAL, "demo", 80)
    with pytest.raises(ShareRevoked):
        await shared.service.admit(older, shared.to)


async def test_a_port_has_only_so_many_links(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "LINKS_MAX", 2)
    first = await shared.service.share(LOCAL, "demo", 80, expires_s=60)
    await shared.token()
    with pytest.raises(Conflict, match="2 links of port 80 count already"):
        await shared.token()
    await shared.service.publish(LOCAL, "demo", 80)
    await shared.service.revoke(LOCAL, "demo", first.link.id)
    await shared.token()
    entries = await shared.plane.service.log(CTX, "demo")
    assert sum(entry.kind == "port-shared" for entry in entries) == 4, "a refusal is none"


async def test_links_made_and_taken_back_at_the_same_time(shared: Shared) -> None:
    """A link that was made while another one's end was being written still counts."""
    for _ in range(5):
        last = await shared.service.share(LOCAL, "demo", 80, expires_s=600)
        made, _ = await asyncio.gather(
            shared.service.share(LOCAL, "demo", 80, expires_s=60), shared.service.revoke(LOCAL, "demo", last.link.id)
        )
        assert (await shared.service.admit(made.token, shared.to)).links_until == made.link.until
        await shared.service.revoke(LOCAL, "demo", made.link.id)
        assert await shared.service.shared(LOCAL, "demo") == []
