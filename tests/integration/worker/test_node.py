"""``perdure worker`` with Node.js: the bootstrap that is shipped, and AWS's durable SDK for TypeScript on it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from perdure.core.ids import DEFAULT_TENANT
from perdure.runs.protocol import ExecutionStatus
from tests.fakes.api_server import FakeServer
from tests.integration.worker.conftest import Start
from tests.integration.worker.stage import DEADLINE_S, advance, begin, ended, notes
from tests.integration.worker.test_durable import HOUR_S, waits

OLDEST = 20
SOURCES = Path(__file__).parent / "node"


def node_version() -> int:
    """0: there is none."""
    if shutil.which("node") is None:
        return 0
    told = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True, timeout=DEADLINE_S).stdout
    return int(told.strip().removeprefix("v").partition(".")[0])


pytestmark = pytest.mark.skipif(node_version() < OLDEST, reason=f"needs Node.js {OLDEST} or newer (apt-get install nodejs npm)")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The handlers with their packages, as the lock names them."""
    made = tmp_path_factory.mktemp("node")
    for path in SOURCES.iterdir():
        shutil.copy(path, made)
    if shutil.which("npm") is None:
        pytest.skip("needs npm, for AWS's SDK for TypeScript")
    command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(command, cwd=made, capture_output=True, text=True, check=False, timeout=200)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install AWS's SDK for TypeScript here: {done.stderr[-300:]}")
    return made


def test_a_handler_without_any_package(server: FakeServer, worker: Start) -> None:
    run = worker(f"{SOURCES / 'plain.mjs'}:double", "--plain", "--concurrency", "1")
    run.event("registered")
    told = json.loads(ended(server, begin(server, "double", {"n": 4})).result or "")
    assert (told["doubled"], told["left"]) == (8, True) and told["arn"].endswith(":function:double:$LATEST")
    failed = ended(server, begin(server, "double", {}))
    assert failed.status is ExecutionStatus.FAILED and failed.error is not None
    assert (failed.error.error_type, failed.error.error_message) == ("TypeError", "n is missing")
    assert "at double" in (failed.error.stack_trace or ("",))[0]


@pytest.mark.parametrize(
    ("place", "why"), [("nosuch.mjs:main", "Cannot find module"), ("plain.mjs:missing", "exports no function")]
)
def test_a_handler_that_is_not_there(worker: Start, place: str, why: str) -> None:
    run = worker(f"{SOURCES / place}")
    assert run.exit_code() == 1 and why in run.stderr.splitlines()[-1]


def test_step_wait_callback_and_map(server: FakeServer, worker: Start, project: Path, tmp_path: Path) -> None:
    run = worker(f"{project / 'handlers.mjs'}:everything", "--concurrency", "1")
    run.event("registered")
    execution_id = begin(server, "everything", {"n": 1})
    waits(run, execution_id)
    advance(server, HOUR_S)
    waits(run, execution_id)
    (callback_id,) = notes(tmp_path, "callback")
    server.run(lambda: server.executions.complete_callback(DEFAULT_TENANT, callback_id, "yes"))
    assert json.loads(ended(server, execution_id).result or "") == {"step": 2, "mapped": [10, 20, 30], "asked": "yes"}


def test_a_process_that_is_killed_in_a_step(server: FakeServer, worker: Start, project: Path, tmp_path: Path) -> None:
    run = worker(f"{project / 'handlers.mjs'}:dies", "--concurrency", "1")
    run.event("registered")
    execution_id = begin(server, "dies")
    run.event("ended", execution_id=execution_id, result="raised", error_type="Runtime.ExitError")
    advance(server, HOUR_S)
    assert json.loads(ended(server, execution_id).result or "") == "survived"
    assert (len(notes(tmp_path, "deadly")), len(notes(tmp_path, "before"))) == (2, 1)
