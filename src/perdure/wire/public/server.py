"""The server itself: whether it serves, and what its host can do."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from perdure.wire.node import Isolation
from perdure.wire.public.common import Answer


class Health(Answer):
    status: Literal["ok"] = "ok"
    version: str
    pid: int


class CheckStatus(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class DoctorCheck(Answer):
    """One thing looked at: what was found, and the command that mends it."""

    name: str
    status: CheckStatus
    detail: str
    hint: str = ""


class DoctorReport(Answer):
    ok: bool
    isolation: Isolation | None = None
    host: dict[str, str] = Field(default_factory=dict)
    checks: list[DoctorCheck] = Field(default_factory=list)
