"""What all bodies share: their bases, their types, errors, and the headers beside them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from perdure.core.ids import SNAPSHOT_NAME, USER_NAME

#: Seconds between heartbeat lines of a stream. A client may call a stream dead after a few of them are missing.
HEARTBEAT_S = 10.0
#: Answers that touched an awake workspace say in these headers what it ran on, and what a wake caused by the call kept (JSON).
GENERATION_HEADER = "perdure-generation"
ISOLATION_HEADER = "perdure-isolation"
RESUME_HEADER = "perdure-resume-report"
#: Every answer of the API from behind its guards: the isolation grade of workspaces on this host, and which protections around
#: their machines hold, as a token with boolean parameters (RFC 8941); ``none`` where no workspace can run.
CONFINEMENT_HEADER = "perdure-confinement"
REQUEST_ID_HEADER = "perdure-request-id"
#: On an answer that is not the program's own, though it was asked for a port of a workspace: the error's code.
REASON_HEADER = "perdure-reason"
#: On what a program in a workspace has answered itself, errors of its own included; its value is ``program``.
ANSWERED_BY_HEADER = "perdure-answered-by"
#: What a client may send to name its request itself. Answers have both.
CLIENT_REQUEST_ID_HEADER = "x-request-id"
IDEMPOTENCY_HEADER = "idempotency-key"

Seconds = Annotated[float, Field(ge=0, le=10 * 365 * 86400)]
#: Of a limit that ends something: none at all is null, not 0.
LimitSeconds = Annotated[float, Field(gt=0, le=10 * 365 * 86400)]


def _without_zero(text: str) -> str:
    if "\0" in text:
        raise ValueError("it contains a zero character, which nothing here can hold")
    return text


_WITHOUT_ZERO = AfterValidator(_without_zero)
#: For the description of a text that holds no zero character, which somebody else refuses.
NO_ZERO: dict[str, JsonValue] = {"pattern": "^[^\\u0000]*$"}
Text = Annotated[str, Field(max_length=4096, json_schema_extra=NO_ZERO), _WITHOUT_ZERO]
#: Of an environment variable. Likewise, but for the zero.
EnvName = Annotated[str, Field(max_length=4096, json_schema_extra={"pattern": "^[^=\\u0000]+$"}), _WITHOUT_ZERO]
#: Of workspaces, keys and tenants, and of snapshots. The patterns are for the API's description: whoever makes the thing refuses
#: another name, in a sentence that says the rule.
Name = Annotated[str, Field(max_length=4096, json_schema_extra={"pattern": USER_NAME.pattern}), _WITHOUT_ZERO]
SnapshotName = Annotated[str, Field(max_length=4096, json_schema_extra={"pattern": SNAPSHOT_NAME.pattern}), _WITHOUT_ZERO]
Base64 = Annotated[str, Field(pattern="^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$")]


class Answer(BaseModel):
    """Base of everything the server sends. A client starts often and uses a few of these, so each is compiled when it is first
    used; a server calls ``compile_all``."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class Body(BaseModel):
    """Base of everything a client sends. Compiled like an ``Answer``. A value has the type that the description says: "5" is no
    number, and 1 is not true. (JSON has no enums and no times, so fields of these kinds say that they read text.)"""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, given: object) -> object:
        """In JSON 5.0 is as good a whole number as 5."""
        if not isinstance(given, dict):
            return given
        return {name: _whole(value) for name, value in given.items()}


def _whole(value: object) -> object:
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def compile_all() -> None:
    """Compile every body now, and whatever is made of it at once from here on."""
    waiting: list[type[BaseModel]] = [Answer, Body]
    while waiting:
        kind = waiting.pop()
        kind.model_config["defer_build"] = False
        kind.model_rebuild()
        waiting += kind.__subclasses__()


class ErrorInfo(Answer):
    """``retryable``: nothing was done; ``ambiguous``: it may have been; ``gone``: the thing will not come back."""

    code: str
    message: str
    hint: str = ""
    retryable: bool = False
    ambiguous: bool = False
    gone: bool = False
    details: dict[str, str] = Field(default_factory=dict, description="Facts a program may act on, by name; mostly none.")
    request_id: str = Field(default="", description="Of the request that failed, as in the server's log.")


class ErrorAnswer(Answer):
    error: ErrorInfo


class Paged(Answer):
    """Base of lists that grow. The next page is asked for with its ``cursor``; None: this is the last one."""

    next_cursor: str | None = None


class Accepted(Answer):
    """The server will do it after this answer has left."""

    accepted: Literal[True] = True


class Done(Answer):
    ok: Literal[True] = True
