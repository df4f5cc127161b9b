"""What keeps a workspace awake, when it wakes by itself, and what becomes of it when nobody does for long."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, BeforeValidator, ConfigDict, Field, model_validator

from perdure.wire.public.common import Answer, Body, Seconds

#: How long a workspace may be asleep before its policy is applied.
Days = Annotated[float, Field(ge=1, le=3660)]
AsleepAction = Literal["keep", "archive", "delete"]


class AwakeReason(Answer):
    """One thing that keeps it awake: so many requests under way, commands that have not ended, streams into it, its own
    connections to the outside; its agent program, which says that it is busy; a ``keep_awake`` with so many seconds left; or its
    policy, which is to never sleep by itself."""

    use: Literal["request", "command", "stream", "outbound", "program", "keep-awake", "policy"]
    count: int = 1
    left_s: float | None = None


class IdleInfo(Answer):
    """Of a workspace that is awake: for how many seconds nobody has used it, what keeps it awake, and in how many seconds it
    falls asleep if nothing happens; None: that depends on the reasons."""

    unused_s: float
    reasons: list[AwakeReason]
    sleeps_in_s: float | None


def _written(value: object) -> object:
    """Not the number of seconds since some year, which every program counts from another."""
    if isinstance(value, int | float) or (isinstance(value, str) and value.strip("+-. ").replace(".", "").isdigit()):
        raise ValueError("write it as a date and a time with its offset from UTC, such as 2026-12-24T18:00:00Z")
    return value


Moment = Annotated[AwareDatetime, Field(strict=False), BeforeValidator(_written)]


class WakeAt(Body):
    """Exactly one of the two. ``at`` is a time with its offset from UTC, or null: not any more. ``in_s`` counts from now on the
    server's clock."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": ["at"]}, {"required": ["in_s"], "properties": {"in_s": {"type": "number"}}}],
            "maxProperties": 1,
        }
    )

    at: Moment | None = None
    in_s: Seconds | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> WakeAt:
        given = self.model_fields_set
        if len(given) != 1 or ("in_s" in given and self.in_s is None):
            raise ValueError("give either 'at' (a time, or null to wake it no more) or 'in_s'")
        return self
