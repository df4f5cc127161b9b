"""Verification of recorded histories."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from perdure.wire.public.common import Answer, ErrorInfo


class HistoryViolation(Answer):
    """The history of a workspace or of an execution that is not as it was written. ``entry``: the first that is wrong, counted
    from 1; 0: what is stored beside the history does not say what the history says. Of ``heads``, what was signed of all
    histories, ``id`` is the object's name."""

    of: Literal["workspace", "execution", "heads"]
    id: str
    entry: int
    reason: str


class HistoriesEvent(Answer):
    """One line of a verification's stream: ``progress``, ``violation`` (what was found), at the end ``done``, or ``error``."""

    type: Literal["progress", "violation", "done", "error", "heartbeat"]
    workspaces: int = Field(default=0, description="Whose threads have been read.")
    executions: int = Field(default=0, description="Whose histories have been read.")
    entries: int = Field(default=0, description="That all of them have together.")
    violations: int = Field(default=0, description="Histories in which something is wrong.")
    violation: HistoryViolation | None = None
    error: ErrorInfo | None = None
