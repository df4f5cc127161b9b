"""What an answer says of its host, and to whom."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from perdure.api.confined import PROTECTIONS, Confined, stated
from perdure.wire.node import Confinement, Isolation

WHOLE = Confinement(Isolation.VM_HARDWARE, True, True, True, True, True, True, True)


def test_every_protection_is_said_to_hold_or_not() -> None:
    assert set(PROTECTIONS) == {field.name for field in fields(Confinement)} - {"isolation", "missing"}
    assert stated(WHOLE) == (
        "vm-hardware;jail=?1;seccomp=?1;own_user=?1;memory_limit=?1;cpu_limit=?1;pids_limit=?1;readonly_base=?1"
    )
    for name in PROTECTIONS:
        without = stated(replace(WHOLE, isolation=Isolation.VM_EMULATED, missing={name: "why"}, **{name: False}))
        grade, *said = without.split(";")
        assert (grade, [one for one in said if one.endswith("=?0")]) == ("vm-emulated", [f"{name}=?0"])
    assert stated(None) == "none"


@pytest.mark.parametrize("kind", ["http.response.start", "websocket.accept", "websocket.http.response.start"])
async def test_it_is_in_the_head_of_each_kind_of_answer_beside_what_is_there(kind: str) -> None:
    sent: list[Any] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": kind, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b"x"})

    async def keep(message: Any) -> None:
        sent.append(message)

    async def nothing() -> Any:
        raise AssertionError("nobody reads")

    await Confined(app, None)({"type": "http"}, nothing, keep)
    assert sent == [
        {"type": kind, "headers": [(b"a", b"b"), (b"perdure-confinement", b"none")]},
        {"type": "http.response.body", "body": b"x"},
    ]
