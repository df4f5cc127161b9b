"""Which requests end when what let them in counts no more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perdure.access.tokens import Grant
from perdure.api.services import Services
from perdure.api.underway import Underway
from perdure.core.config import Settings
from perdure.core.errors import Unavailable
from perdure.core.ids import DEFAULT_TENANT, KeyId, LinkId, WorkspaceId
from tests.fakes.workspaces import fake_services

STOPPING = Unavailable("The server is stopping.")
KEY, OTHER = KeyId("key_1"), KeyId("key_2")
GRANT = Grant(DEFAULT_TENANT, WorkspaceId("ws_1"), 80, 1 << 40, 7, LinkId("lnk_1"))


class Judges:
    """Says of each what it is told."""

    def __init__(self) -> None:
        self.gone: set[object] = set()
        self.asked: list[object] = []

    async def ended(self, leaves: list[object]) -> list[object]:
        self.asked += leaves
        return [one for one in leaves if one in self.gone]


@pytest.fixture
def judges() -> Judges:
    return Judges()


@pytest.fixture
def underway(judges: Judges) -> Underway:
    services: Services = fake_services(Settings())[0]
    return Underway(replace(services, access=judges, shares=judges))  # type: ignore[arg-type]


async def test_only_what_has_lost_its_leave_ends(underway: Underway, judges: Judges) -> None:
    with (
        underway.request(KEY) as first,
        underway.request(KEY) as second,
        underway.request(OTHER) as other,
        underway.request(GRANT) as visitor,
        underway.request(None) as ours,
    ):
        await underway.look()
        assert not any(one.is_set() for one in (first, second, other, visitor, ours))
        judges.gone = {KEY, GRANT}
        await underway.look()
        assert [one.is_set() for one in (first, second, other, visitor, ours)] == [True, True, False, True, False]
        assert [one.reason(STOPPING).code for one in (first, visitor, other)] == [
            "unauthenticated",
            "share_revoked",
            "unavailable",
        ]
    assert None not in judges.asked, "nothing ends what needed no key"


async def test_nobody_is_asked_while_nothing_is_under_way(underway: Underway, judges: Judges) -> None:
    with underway.request(KEY), underway.request(GRANT):
        pass
    with underway.request(None):
        await underway.look()
    assert judges.asked == []


async def test_a_request_that_is_over_hears_nothing_and_takes_nobody_along(underway: Underway, judges: Judges) -> None:
    judges.gone = {KEY}
    with underway.request(KEY) as longer:
        with underway.request(KEY) as shorter:
            pass
        await underway.look()
        assert (longer.is_set(), shorter.is_set()) == (True, False)


def test_a_server_that_stops_ends_all_and_what_comes_then(underway: Underway) -> None:
    with underway.request(None) as ours, underway.request(KEY) as theirs:
        underway.stop()
        assert ours.is_set() and theirs.is_set()
        assert theirs.reason(STOPPING) is STOPPING
    with underway.request(KEY) as late:
        assert late.is_set()
