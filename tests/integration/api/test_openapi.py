"""The API against its own description: every route is sent what the OpenAPI document allows and what it forbids, over real HTTP,
service and PostgreSQL, and schemathesis judges each answer by the document.

Examples are few and always the same ones; PERDURE_TEST_LONG=1 tries many more. A route that is added is walked by itself.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any

import httpx2
import pytest
import schemathesis
from schemathesis.config import SchemathesisConfig

from perdure.api import policy
from perdure.core.errors import error_classes
from perdure.core.paging import Place, seq_cursor
from perdure.runs.protocol import marker_of
from perdure.wire import public
from tests.fakes.workspaces import KEY
from tests.integration.api.stage import OPENAPI, ROUTES, stage

IS_LONG = bool(os.environ.get("PERDURE_TEST_LONG"))
BEARER = {"authorization": f"Bearer {KEY}"}
DEADLINE_S = 60
LINES = "application/x-ndjson"
#: How long a stream that shows a command may last, which a command without an end would make endless.
STREAM_S = 0.05
EXEC_ID, ENDED_ID, UPLOAD_ID = "exe_0123456789", "exe_9876543210", "upl_0123456789"

#: Routes that are not walked here, and why not.
ELSEWHERE = {
    "openapi": "the document does not describe itself",
    "watch_dir": "its stream ends with the workspace: it is read by hand below",
    "tunnel": "OpenAPI knows no WebSockets: test_tunnels.py",
    "exec_socket": "OpenAPI knows no WebSockets: test_exec_streams.py",
    "invoke_socket": "OpenAPI knows no WebSockets: test_invocations.py",
    "proxy_port": "a program in a workspace answers, with what it likes: test_ports.py",
}


def _rather(*values: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A dictionary, and how a parameter takes its values from it more often than not: most of what is made up names nothing."""
    name = "-".join(values).replace("/", "_")
    return {name: {"values": list(values)}}, {"dictionary": name, "probability": 0.7}


_NAMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "path.ref": _rather("demo"),
    "path.tenant": _rather("acme"),
    "path.snapshot": _rather("first"),
    "path.exec_id": _rather(EXEC_ID),
    "path.upload_id": _rather(UPLOAD_ID),
    "query.path": _rather("/x", "/dir", "/dir/new"),
    "query.source": _rather("/x"),
    "query.destination": _rather("/dir/new"),
    "query.tenant": _rather("acme"),
    "query.workspace": _rather("demo"),
    "query.execution": _rather("demo"),
    "body.function": _rather("greet"),
    "body.tenant": _rather("acme"),
}


#: Routes that may refuse (422) what the document allows, because of a rule that it cannot say.
_FILES = "what is at a path decides what can be done there, and `..` may not lead out"
RULES = {
    "create_workspace": "a disk is no smaller than the image's, egress entries have a grammar, days and action belong together",
    "configure_workspace": "days and action belong together",
    "fork_workspace": "as many names as branches, no two alike",
    "resize_workspace": "a disk only grows",
    "start_exec": "one of argv and shell, whose first word is not empty",
    "set_program": "its first word is not empty",
    "wake_at": "within ten years",
    "usage": "the end is after the beginning",
    "register_worker": "no function twice",
    "create_webhook": "a URL has more of a grammar",
    **dict.fromkeys(("read_file", "write_file", "hash_file", "list_dir", "stat_file", "make_dir", "remove", "rename"), _FILES),
    **dict.fromkeys(("make_link", "set_attributes", "read_dir", "write_dir", "begin_upload", "finish_upload"), _FILES),
}
#: Routes that may answer with these, to what is well asked.
SERVER_ERRORS = {
    "wake_workspace": ["504"],  # its deadline may be 0
    "invoke": ["502", "504"],  # nothing answers in the workspace
}
FINE = ["2xx", "401", "403", "404", "409", "429"]
#: Cursors are made by the server; this one comes before everything.
NO_PLACE = Place(datetime(1970, 1, 1, tzinfo=UTC), "a").cursor()


CURSORS = {
    "workspace_log": seq_cursor(0),
    "list_deliveries": seq_cursor(0),
    "list_executions": base64.urlsafe_b64encode(b"2100-01-01T00:00:00+00:00 exn_0").decode(),
    **dict.fromkeys(("execution_history", "execution_operations"), marker_of(0)),
}


def _operation(name: str) -> dict[str, Any]:
    server = SERVER_ERRORS.get(name, [])
    positive = [*FINE, *(["422"] if name in RULES else []), *server]
    return {
        "include-operation-id": name,
        "checks": {
            "positive_data_acceptance": {"expected-statuses": positive},
            "not_a_server_error": {"expected-statuses": ["2xx", "3xx", "4xx", *server]},
        },
        "parameters": {
            "query.cursor": CURSORS.get(name, NO_PLACE),
            **({"path.exec_id": ENDED_ID} if name == "follow_python" else {}),  # a cell is followed to its end
            **({"body.snapshot": _NAMES["path.snapshot"][1]} if name in {"rewind_workspace", "fork_workspace"} else {}),
        },
    }


CONFIG: dict[str, Any] = {
    "suppress-health-check": ["all"],
    "dictionaries": {name: values for one, _ in _NAMES.values() for name, values in one.items()},
    "parameters": {
        **{name: binding for name, (_, binding) in _NAMES.items()},
        "query.follow": "false",  # a feed and a log that are followed do not end
        "query.wait_s": "0",
    },
    "generation": {
        "deterministic": True,
        "database": "none",
        "no-shrink": not IS_LONG,
        "max-examples": 50 if IS_LONG else 5,
        "allow-extra-parameters": False,  # what a query has beyond the document is passed over
        "with-security-parameters": False,  # every request has the operator's key; ``ignored_auth`` takes it away
    },
    # What is asked depends on nothing that was answered before: tests run in any order, and alone.
    "phases": {
        "coverage": {"enabled": IS_LONG},
        "fuzzing": {"extra-data-sources": {"responses": False}, "error-feedback": {"enabled": False}},
        "stateful": {"enabled": False},
    },
    "checks": {
        "negative_data_rejection": {"expected-statuses": ["400", "404", "405", "409", "413", "415", "416", "422", "429"]},
    },
    "operations": [_operation(name) for name in ROUTES],
}
SCHEMA = schemathesis.openapi.from_path(OPENAPI, config=SchemathesisConfig.from_dict(CONFIG))
STATUS_OF = {code: kind.status for code, kind in error_classes().items()}


@schemathesis.serializer("application/x-tar")
def _as_they_are(_: schemathesis.SerializationContext, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


class Served:
    """The stage in a thread with a loop of its own, since the tests here are sync, and the operator's client of it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._stack = AsyncExitStack()
        self.http: httpx2.Client
        self.is_used = True  # something has changed since the last reset

    def __enter__(self) -> Served:
        self._thread.start()

        async def begin() -> str:
            staged = await self._stack.enter_async_context(stage())
            await staged.tenant("acme")
            await staged.key("read", name="demo")
            return str(staged.http.base_url)

        url = asyncio.run_coroutine_threadsafe(begin(), self._loop).result(DEADLINE_S)
        self.http = httpx2.Client(base_url=url, headers=BEARER, timeout=DEADLINE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

        async def end() -> None:
            await self._stack.aclose()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:  # of commands that the fake guest still runs
                task.cancel()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    @property
    def url(self) -> str:
        return str(self.http.base_url).rstrip("/")

    def _make(self, method: str, path: str, **options: Any) -> Any:
        answer = self.http.request(method, f"/v1/{path}", **options)
        assert answer.is_success, answer.text
        return answer.json()

    def reset(self) -> None:
        """One workspace, awake, with a snapshot, files, a command that waits for input, one that has ended, and an upload that
        has begun; and an execution."""
        while found := self._make("GET", "workspaces")["workspaces"]:
            for one in found:
                self.http.delete(f"/v1/workspaces/{one['id']}")
        self._make("POST", "workspaces", json={"name": "demo", "checkpoint_interval_s": 0})
        self._make("POST", "workspaces/demo/checkpoint", json={"name": "first"})
        self._make("POST", "workspaces/demo/files/mkdir", params={"path": "/dir"})
        self._make("PUT", "workspaces/demo/files/content", params={"path": "/x"}, content=b"content")
        cat = {"argv": ["cat"], "stdin": True, "background": True, "exec_id": EXEC_ID}
        self._make("POST", "workspaces/demo/execs", json=cat)
        self._make("POST", "workspaces/demo/execs", json={"argv": ["true"], "background": True, "exec_id": ENDED_ID})
        self._make("PUT", f"workspaces/demo/files/uploads/{UPLOAD_ID}")
        self._make("POST", "workers", json={"functions": [{"name": "greet", "digest": "v1"}]})
        self._make("POST", "executions", json={"function": "greet", "name": "demo"})
        self.is_used = False

    def mend(self) -> None:
        """Before what may change something: as after ``reset``, if the example before has not left it so."""
        self.is_used = True
        found = self.http.get(f"/v1/workspaces/demo/execs/{EXEC_ID}")
        if not found.is_success or found.json()["outcome"] is not None:
            self.reset()


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    with Served() as served:
        yield served


@pytest.fixture
def served(running: Served) -> Served:
    if running.is_used:
        running.reset()
    return running


def bound(case: schemathesis.Case) -> None:
    """Let no stream of a command last for long."""
    if isinstance(case.body, dict) and "/execs" in case.path:
        wait_s = case.body.get("wait_s")
        if wait_s is None or (isinstance(wait_s, int | float) and wait_s > STREAM_S):
            case.body = {**case.body, "wait_s": STREAM_S}


def check_code(status: int, answer: Any) -> None:
    """The document lets errors have any status; an error's code says which one it must be."""
    error = answer["error"]
    assert error["message"].endswith((".", "?", "!")), error
    assert STATUS_OF[error["code"]] == status, error


def check_lines(operation: Any, status: int, lines: list[str]) -> None:
    """Each line of a stream is what the document says of one."""
    schema = operation["responses"][str(status)]["content"][LINES]["schema"]
    model = getattr(public, schema["$ref"].rpartition("/")[2])
    for line in lines:
        unknown = set(json.loads(line)) - set(model.model_fields)
        assert not unknown, f"{unknown} of {line}"
        model.model_validate_json(line)


@SCHEMA.exclude(operation_id="watch_dir").parametrize()
def test_answers_are_as_documented(case: schemathesis.Case, served: Served) -> None:
    if case.method != "GET":
        served.mend()
    bound(case)
    response = case.call(base_url=served.url, headers=BEARER, timeout=DEADLINE_S)
    case.validate_response(response, headers=BEARER)
    if response.status_code >= 400:
        check_code(response.status_code, response.json())
    if response.headers.get("content-type") == [LINES]:
        check_lines(case.operation.definition.raw, response.status_code, response.content.decode().splitlines())


def test_a_method_that_is_not_there_is_told_all_that_are(served: Served) -> None:
    for path, methods in (("/v1/keys", "GET, POST"), ("/v1/workspaces/demo", "DELETE, GET, PATCH"), ("/metrics", "GET")):
        refused = served.http.request("PUT", path)
        assert (refused.status_code, refused.headers["allow"]) == (405, methods)
        check_code(refused.status_code, refused.json())


def test_every_route_is_walked_here_or_said_to_be_elsewhere() -> None:
    walked = {found.ok().definition.raw["operationId"] for found in SCHEMA.get_all_operations()} - {"watch_dir"}
    assert walked | set(ELSEWHERE) == set(policy.NEEDS)
    assert not walked & set(ELSEWHERE)


def test_lines_of_a_watch_are_as_documented(served: Served) -> None:
    operation = json.loads(OPENAPI.read_text())["paths"]["/v1/workspaces/{ref}/files/watch"]["get"]
    with served.http.stream("GET", "/v1/workspaces/demo/files/watch", params={"path": "/dir"}) as stream:
        assert (stream.status_code, stream.headers["content-type"]) == (200, LINES)
        lines = stream.iter_lines()
        read = [next(lines)]
        served.http.put("/v1/workspaces/demo/files/content", params={"path": "/dir/new"}, content=b"x")
        read.append(next(lines))
    check_lines(operation, 200, read)
    assert [json.loads(line)["type"] for line in read] == ["started", "created"]
    for wrong in ({}, {"path": "/dir", "after": "-1"}, {"path": "/dir", "recursive": "perhaps"}, {"path": "dir"}):
        refused = served.http.get("/v1/workspaces/demo/files/watch", params=wrong)
        assert refused.status_code == 422, wrong
