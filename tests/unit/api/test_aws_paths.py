"""Paths as they come: whatever way a client encodes an ARN, it is one part of the path, and names the same execution."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import botocore
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.routing import Match

from perdure.api.aws.paths import is_aws
from perdure.api.aws.routes import AwsRoute, routes
from perdure.api.guard import STREAMED

ARN = "arn:aws:lambda:us-east-1:000000000000:function:main:$LATEST/durable-execution/order-7/exn_1"
ROUTES = {route.name: route for route in routes()}


def scope_of(method: str, raw_path: bytes, **headers: str) -> dict[str, Any]:
    sent = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": method, "raw_path": raw_path, "query_string": b"", "headers": sent}


def found(method: str, raw_path: bytes, **headers: str) -> list[tuple[str, dict[str, str]]]:
    scope = scope_of(method, raw_path, **headers)
    matches = ((route, *route.matches(scope)) for route in ROUTES.values())
    return [(route.name, child["path_params"]) for route, match, child in matches if match is Match.FULL]


@st.composite
def encoded(draw: st.DrawFn, text: str) -> str:
    """Each character as it is, or as bytes in hex; slashes always so."""
    coded = []
    for char in text:
        hexed = "".join(f"%{byte:02X}" for byte in char.encode())
        choices = [hexed, hexed.lower()] + ([char] if char not in "/?#%" else [])
        coded.append(draw(st.sampled_from(choices)))
    return "".join(coded)


@settings(deadline=None)
@given(encoded(ARN), st.sampled_from(["", "/checkpoint", "/state", "/history", "/stop", "/pause", "/resume"]))
def test_an_arn_in_any_encoding_is_one_part_of_the_path(arn: str, verb: str) -> None:
    path = f"/2025-12-01/durable-executions/{arn}{verb}".encode()
    for method in ("GET", "POST", "DELETE"):
        for _, params in found(method, path):
            assert params == {"arn": ARN}
    names = {name for method in ("GET", "POST", "DELETE") for name, _ in found(method, path)}
    by_verb = {verb: {route.name for route in routes() if route.path == "/2025-12-01/durable-executions/{arn}" + verb}}
    assert names == by_verb[verb] != set()


@settings(deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60))
def test_any_callback_id_comes_as_it_was_sent(callback: str) -> None:
    path = f"/2025-12-01/durable-execution-callbacks/{quote(callback, safe='')}/succeed".encode()
    assert found("POST", path) == [("aws_succeed", {"callback": callback})]


@pytest.mark.parametrize(
    "raw_path",
    [
        b"/2025-12-01/durable-executions/" + ARN.encode(),
        b"/2025-12-01/durable-executions/x/checkpoint/",
        b"/2025-12-01/durable-executions/x/checkpoint/more",
        b"/2025-12-01//durable-executions/x/checkpoint",
        b"/2025-12-01/durable-executions%2Fx/checkpoint",
        b"/2015-03-31/functions/main",
        b"/",
    ],
)
def test_other_paths_are_nobodys(raw_path: bytes) -> None:
    assert found("POST", raw_path) == [] and found("GET", raw_path) == []


def test_paths_of_everybody_else_are_not_awss() -> None:
    """Those of ``/v1`` least of all, whatever is in their parts."""
    for path in (b"/v1/health", b"/v1/workspaces/2025-12-01", b"/v1/workspaces/x/ports/80/2025-12-01/durable-executions/x", b"/"):
        assert not is_aws(scope_of("POST", path))
    assert not is_aws(scope_of("GET", b"/", **{"x-amz-target": "AWSStepFunctions.SendTaskSuccess"}))
    assert is_aws(scope_of("POST", b"/", **{"x-amz-target": "AWSStepFunctions.SendTaskSuccess"}))
    assert not is_aws(scope_of("POST", b"/", **{"x-amz-target": "DynamoDB_20120810.GetItem"}))
    assert not any(STREAMED.fullmatch(route.path) for route in routes())


def test_methods_and_paths_are_those_of_botocores_model() -> None:
    model = Path(botocore.__file__).parent / "data/lambda/2015-03-31/service-2.json.gz"
    operations = json.loads(gzip.decompress(model.read_bytes()))["operations"]
    names = {"{DurableExecutionArn}": "{arn}", "{FunctionName}": "{function}", "{CallbackId}": "{callback}"}
    durable = {name for name in operations if "Durable" in name} | {"Invoke"}
    assert {route.operation for route in routes()} == durable | {"SendTask*"}, "all there are"
    for route in routes():
        if route.operation in operations:
            assert isinstance(route, AwsRoute)
            uri = operations[route.operation]["http"]["requestUri"]
            for theirs, ours in names.items():
                uri = uri.replace(theirs, ours)
            assert (operations[route.operation]["http"]["method"], uri) == (route.method, route.path)
