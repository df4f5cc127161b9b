"""Verification of histories over the wire: the API's stream, the SDK, and the command; what is found is that of the fake."""

from __future__ import annotations

import pytest

from perdure.runs.service.histories import History, Of
from perdure.sdk import Client
from tests.fakes.api_server import FakeServer
from tests.fakes.histories import FakeHistories
from tests.integration.api.test_cli import Run, perdure

__all__ = ["perdure"]  # the fixture

WHOLE = (History(Of.WORKSPACE, "wsp_1", 7), History(Of.EXECUTION, "exn_1", 5))
CHANGED = History(Of.EXECUTION, "exn_2", 9, 3, "The entry was changed after it was written.")
BESIDE = History(Of.EXECUTION, "exn_3", 2, 0, "The row does not say what the history says: status.")


def found(server: FakeServer, *histories: History) -> None:
    assert isinstance(server.services.histories, FakeHistories)
    server.services.histories.found = list(histories)


@pytest.fixture(autouse=True)
def _nothing_at_first(server: FakeServer) -> None:
    found(server)


def test_each_violation_is_an_event_and_the_sums_come_last(server: FakeServer, client: Client) -> None:
    found(server, *WHOLE, CHANGED, BESIDE)
    first, second, done = client.verify_histories()
    assert first.violation is not None and (first.type, first.executions) == ("violation", 2)
    assert (first.violation.of, first.violation.id, first.violation.entry) == ("execution", "exn_2", 3)
    assert second.violation is not None and second.violation.entry == 0
    assert (done.type, done.workspaces, done.executions, done.entries, done.violations) == ("done", 1, 3, 23, 2)


def test_progress_is_told_in_between(server: FakeServer, client: Client) -> None:
    found(server, *(History(Of.EXECUTION, f"exn_{number}", 2) for number in range(250)))
    assert [(one.type, one.executions) for one in client.verify_histories()] == [
        ("progress", 100), ("progress", 200), ("done", 250),
    ]  # fmt: skip


def test_the_command(server: FakeServer, perdure: Run) -> None:
    nothing = perdure("verify")
    assert (nothing.code, nothing.out) == (2, "There are no histories to verify.\n")
    assert perdure("verify --json").json == {
        "ok": True, "checked": {"workspaces": 0, "executions": 0, "entries": 0}, "violations": [],
    }  # fmt: skip
    found(server, *WHOLE)
    whole = perdure("verify")
    assert (whole.code, whole.out) == (0, "1 thread and 1 execution checked, 12 entries: all hold\n")
    found(server, *WHOLE, CHANGED, BESIDE)
    changed = perdure("verify")
    assert changed.code == 1
    assert changed.out.splitlines() == [
        "! execution exn_2, entry 3: The entry was changed after it was written.",
        "! execution exn_3, the row beside it: The row does not say what the history says: status.",
        "1 thread and 3 executions checked, 23 entries: 2 changed",
    ]
    told = perdure("verify --json")
    assert told.code == 1 and told.json["ok"] is False
    assert told.json["checked"] == {"workspaces": 1, "executions": 3, "entries": 23}
    assert [(one["id"], one["entry"]) for one in told.json["violations"]] == [("exn_2", 3), ("exn_3", 0)]
