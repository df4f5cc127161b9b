"""What an HTTP answer stands for: the error that it tells, or what was asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeVar

from pydantic import ValidationError

from perdure.sdk._core import Call
from perdure.sdk.errors import ForeignAnswer, rebuild
from perdure.wire import public

Model = TypeVar("Model", bound=public.Answer)


def judge(status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
    """Raise the error that an answer stands for, if it stands for one."""
    if status < 400:
        return
    try:
        answer = json.loads(content)
    except ValueError:
        answer = None
    raise rebuild(answer, status, (headers or {}).get(public.REQUEST_ID_HEADER, ""))


def parsed(call: Call, kind: type[Model], content: bytes) -> Model:
    """An answer that should be of a kind. Raises ForeignAnswer for one that is not."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        foreign = ForeignAnswer(f"The answer to {call.method} {call.path} is not one of a Perdure server of this version.")
        foreign.ambiguous = call.keyed or not call.repeatable
        foreign.retryable = not foreign.ambiguous
        raise foreign from error
