"""Who did what, and what was refused to whom."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from perdure.wire.public.common import Answer


class AuditRow(Answer):
    """A call. What became of a workspace is in its thread (``/log``), by the id in ``target``."""

    seq: int
    at: datetime = Field(description="When it was answered; of one that was interrupted, when that was found.")
    tenant_id: str = Field(description="Of the caller; of one without a key that counts, the default tenant.")
    principal: str = Field(description="As in a thread: key:ID, operator or local; empty where nobody knows.")
    route: str = Field(description="The operation's id in this document; empty for a call that did not get so far.")
    target: str = Field(description="An id where that is known, else what the path named.")
    outcome: str = Field(description="ok, the code of the error, or interrupted: the server ended before the call did.")
    status: int = Field(description="Of the HTTP answer; 101 for a connection; 0 where there was none.")
    request_id: str = Field(description="As in the answer; a caller may choose its own.")
    peer: str = Field(description="The address it came from; unix for the server's socket.")
    repeated: int = Field(description="Of refusals: how many this row stands for, of which it shows the last.")


class AuditPage(Answer):
    rows: list[AuditRow]
    next: int = Field(description="The cursor for what follows: rows with a greater seq.")
