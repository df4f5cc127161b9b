"""The examples in the SDK's docstrings run as they stand, the async ones and the sync ones made of them."""

from __future__ import annotations

import ast
import contextlib
import doctest
import inspect
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import perdure.sdk._async as asynchronous
import perdure.sdk._sync as synchronous
from perdure.sdk import AsyncClient, AsyncWorkspace, Client, Workspace
from perdure.sdk._acompat import close_default_client, default_async_client, default_client
from tests.fakes.api_server import FakeServer
from tests.fakes.lived_executions import furnish

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODULES = sorted(path.stem for path in Path(asynchronous.__path__[0]).glob("[a-z]*.py"))


def examples(package: Any) -> Iterator[Any]:
    for name in MODULES:
        module = __import__(f"{package.__name__}.{name}", fromlist=["_"])
        for found in doctest.DocTestFinder(recurse=True, exclude_empty=True).find(module):
            if found.examples:
                yield pytest.param(found, id=found.name.removeprefix(f"{package.__name__}."))


@pytest.fixture
def reader(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody has who tries an example: a server, and a directory with a project in it."""
    monkeypatch.setenv("PERDURE_HOME", str(server.settings.home))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project").mkdir()
    for name in ("main.py", "README.md"):
        (tmp_path / "project" / name).write_text("print('hello')\n")
    server.workspaces.has_store = True
    server.run(lambda: furnish(server.executions))


def shown(test: doctest.DocTest) -> list[doctest.Example]:
    """Without those that say that the fake server cannot do it: ``# doctest: +SKIP``."""
    return [example for example in test.examples if doctest.SKIP not in example.options]


def judge(test: doctest.DocTest, example: doctest.Example, printed: str) -> None:
    if not doctest.OutputChecker().check_output(example.want, printed, FLAGS):
        line = (test.lineno or 0) + example.lineno + 1
        pytest.fail(f"{test.name}:{line}: {example.source}expected:\n{example.want}printed:\n{printed}", pytrace=False)


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("test", [*examples(synchronous)])
def test_sync(test: doctest.DocTest) -> None:
    names: dict[str, Any] = {"Workspace": Workspace, "Client": Client}
    names |= {"ws": Workspace.create("demo"), "client": default_client()}
    try:
        for example in shown(test):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(example.source, test.name, "single"), names)
            judge(test, example, printed.getvalue())
    finally:
        close_default_client()


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("test", [*examples(asynchronous)])
async def test_async(test: doctest.DocTest) -> None:
    """As in ``python -m asyncio``: await may stand at the top."""
    names: dict[str, Any] = {"AsyncWorkspace": AsyncWorkspace, "AsyncClient": AsyncClient}
    client = default_async_client()
    names |= {"ws": await AsyncWorkspace.create("demo"), "client": client}
    try:
        for example in shown(test):
            printed = io.StringIO()
            code = compile(example.source, test.name, "single", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            with contextlib.redirect_stdout(printed):
                result = eval(code, names)
                if inspect.iscoroutine(result):
                    await result
            judge(test, example, printed.getvalue())
    finally:
        await client.aclose()


def test_there_are_as_many_of_either_kind() -> None:
    assert len(list(examples(synchronous))) == len(list(examples(asynchronous))) > 0
