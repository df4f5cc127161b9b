"""What the OpenAPI document says of every route at once."""

from __future__ import annotations

from typing import cast

import pytest

from perdure.api.app import create_app
from perdure.api.services import Services
from perdure.core.errors import error_classes
from perdure.core.ids import SNAPSHOT_NAME, USER_NAME
from perdure.workspaces import checks

APP = create_app(cast("Services", None))


def test_the_document_is_the_same_each_time_it_is_asked_for() -> None:
    first = repr(APP.openapi())
    assert repr(APP.openapi()) == first


def test_every_route_says_how_its_errors_look_and_that_it_wants_a_key() -> None:
    document = APP.openapi()
    assert document["security"] == [{"key": []}]
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    operations = [operation for item in document["paths"].values() for operation in item.values()]
    assert len(operations) > 40
    for operation in operations:
        assert operation["responses"]["default"] == {"$ref": "#/components/responses/Error"}, operation["operationId"]
        assert "security" not in operation, "none is open to everybody"


@pytest.mark.parametrize("code", ["not_found", "stale_generation", "no_space", "missing_scope"])
def test_each_code_stands_beside_its_status(code: str) -> None:
    said = APP.openapi()["components"]["responses"]["Error"]["description"]
    (of_status,) = [part for part in said.split("; ") if code in part]
    assert f"{error_classes()[code].status}: " in of_status
    assert "call_timed_out" not in said, "what only a client tells is no answer"


def field(body: str, name: str) -> dict[str, object]:
    """What is said of a field, apart from that it may be null."""
    said = APP.openapi()["components"]["schemas"][body]["properties"][name]
    (of_value,) = [one for one in said.get("anyOf", [said]) if one.get("type") not in {"null", "string"} or "pattern" in one]
    return dict(of_value)


@pytest.mark.parametrize(
    ("body", "name", "bound", "value"),
    [
        ("CreateWorkspace", "memory_mib", "minimum", checks.MEMORY_RANGE_MIB[0]),
        ("CreateWorkspace", "memory_mib", "maximum", checks.MEMORY_RANGE_MIB[1]),
        ("CreateWorkspace", "vcpus", "maximum", checks.VCPU_LIMIT),
        ("CreateWorkspace", "disk_gib", "maximum", checks.DISK_LIMIT_GIB),
        ("ResizeWorkspace", "disk_gib", "maximum", checks.DISK_LIMIT_GIB),
        ("CreateWorkspace", "idle_timeout_s", "maximum", checks.TIMER_LIMIT_S),
        ("ConfigureWorkspace", "checkpoint_interval_s", "maximum", checks.TIMER_LIMIT_S),
        ("ConfigureWorkspace", "keep_snapshots", "maximum", checks.KEEP_LIMIT),
        ("KeepAwake", "seconds", "maximum", checks.KEEP_AWAKE_LIMIT_S),
        ("ForkWorkspace", "count", "maximum", checks.FORK_LIMIT),
        ("CreateWorkspace", "name", "pattern", USER_NAME.pattern),
        ("CreateKey", "name", "pattern", USER_NAME.pattern),
        ("CheckpointWorkspace", "name", "pattern", SNAPSHOT_NAME.pattern),
    ],
)
def test_it_says_the_bounds_that_the_services_check(body: str, name: str, bound: str, value: object) -> None:
    assert field(body, name)[bound] == value
