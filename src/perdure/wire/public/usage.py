"""What workspaces used between two instants."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from perdure.wire.public.common import Answer

UsageBy = Literal["workspace", "tenant"]


class UsageAmounts(Answer):
    """Seconds and bytes; ``…_byte_s`` is bytes times the seconds for which they were held.

    Every second from a workspace's creation to its deletion is in exactly one of ``awake_s`` (it has a machine, or one is
    being started or put to sleep), ``paused_s`` (its machine stands still, because its node's disk is full) and ``asleep_s``.
    ``losses`` counts machines that were found dead: their time ends where they were last known to run. ``sent_bytes`` and
    ``received_bytes`` went through egress; ``request_bytes`` came from callers into its files, commands, ports and program, and
    ``answer_bytes`` went to them.
    """

    awake_s: float
    paused_s: float
    asleep_s: float
    losses: int
    cpu_s: float
    memory_byte_s: float
    local_byte_s: float
    store_byte_s: float
    sent_bytes: int
    received_bytes: int
    uploaded_bytes: int
    fetched_bytes: int
    request_bytes: int = 0
    answer_bytes: int = 0


class Meters(Answer):
    """What the meters of an awake workspace say now. They only grow in one generation: seconds of processor time of its machine;
    bytes that it has sent and received through egress, in earlier generations too while the server runs."""

    workspace_id: str
    name: str
    generation: int
    cpu_s: float
    sent_bytes: int
    received_bytes: int


class MeterReadings(Answer):
    """Of those that this server has awake. ``at``: when they were read, by its clock."""

    at: datetime
    meters: list[Meters]


class UsageRow(UsageAmounts):
    """Of one workspace, deleted or not; of the whole tenant where that was asked for, and then nothing names one workspace."""

    tenant_id: str
    workspace_id: str | None
    name: str | None
    state: str | None


class UsageReport(Answer):
    """``since`` is None when it is counted from the first workspace on, ``until`` when it is counted to the instant of the
    answer."""

    by: UsageBy
    since: datetime | None
    until: datetime | None
    rows: list[UsageRow]
