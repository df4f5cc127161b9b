"""What a body takes for a value of a type: what the API's description says, and nothing that could be read as one."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from perdure.core.scopes import KeyScope
from perdure.wire import public


@pytest.mark.parametrize(
    ("body", "given"),
    [
        (public.ForkWorkspace, {"count": "2"}),
        (public.ForkWorkspace, {"count": True}),
        (public.ForkWorkspace, {"count": 1.5}),
        (public.KeepAwake, {"seconds": "60"}),
        (public.StartExec, {"argv": ["true"], "background": "true"}),
        (public.StartExec, {"argv": ["true"], "stdin": 1}),
        (public.StartExec, {"argv": [1]}),
        (public.StartExec, {"argv": ["true"], "run_limit_s": 0}),
        (public.StartExec, {"argv": ["true"], "env": {"A=B": "1"}}),
        (public.StartExec, {"argv": ["true"], "pty": {"rows": "24"}}),
        (public.WakeAt, {"at": 1_700_000_000}),
        (public.WakeAt, {"at": "1700000000"}),
        (public.CreateKey, {"name": "a", "scopes": ["everything"]}),
    ],
)
def test_what_only_looks_like_a_value_is_refused(body: type[public.Body], given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        body.model_validate(given)


def test_json_has_no_enums_no_times_and_one_kind_of_number() -> None:
    assert public.ForkWorkspace.model_validate({"count": 2.0}).count == 2
    assert public.KeepAwake.model_validate({"seconds": 60}).seconds == 60.0
    assert public.CreateKey.model_validate({"name": "a", "scopes": ["read"]}).scopes == [KeyScope.READ]
    assert public.SetProgram.model_validate({"argv": ["a"], "restart": "never"}).restart.value == "never"
    at = public.WakeAt.model_validate({"at": "2026-12-24T18:00:00+01:00"}).at
    assert at is not None and at.isoformat() == "2026-12-24T18:00:00+01:00"
