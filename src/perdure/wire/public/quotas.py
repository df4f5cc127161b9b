"""What a tenant may have, and has."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from perdure.wire.public.common import Answer, Body

Count = Annotated[int, Field(ge=0, le=1 << 40)]
Gib = Annotated[float, Field(ge=0, le=1 << 40, allow_inf_nan=False)]


class SetQuota(Body):
    """Limits that are left out stay; null takes one away."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    workspaces: Count | None = None
    memory_awake_mib: Count | None = None
    storage_gib: Gib | None = None
    execs: Count | None = None


class QuotaLimits(Answer):
    """null: no limit."""

    workspaces: int | None
    memory_awake_mib: int | None
    storage_gib: float | None
    execs: int | None


class QuotaUse(Answer):
    """What counts towards each limit now. ``execs`` are those that run on the server that answers."""

    workspaces: int
    memory_awake_mib: int
    storage_gib: float
    execs: int


class QuotaInfo(Answer):
    """``awake`` are names of workspaces that use the memory, the largest first, twenty at most."""

    tenant_id: str
    name: str | None
    limits: QuotaLimits
    used: QuotaUse
    awake: list[str]
