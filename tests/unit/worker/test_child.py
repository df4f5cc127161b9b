"""The process of handlers: what it takes for a handler, for a durable one and for its code, and what it says of an invocation."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aws_durable_execution_sdk_python import DurableContext, durable_execution

from perdure.worker import child

JOB = {"function": "main", "function_arn": "arn:main", "request_id": "r-1", "event": {"a": 1}, "timeout_s": 60}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that modules are imported from, and forgotten after the test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # whoever imports a module twice in a second would get the old one
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def outer(*arguments: Any) -> Any:
        return function(*arguments)

    return outer


def test_a_durable_handler_is_told_from_others() -> None:
    @durable_execution
    def bare(event: Any, context: DurableContext) -> None: ...

    @durable_execution(plugins=[])
    def called(event: Any, context: DurableContext) -> None: ...

    def plain(event: Any, context: Any) -> None: ...

    assert child.is_durable(bare) and child.is_durable(called) and child.is_durable(logged(bare))
    assert not child.is_durable(plain) and not child.is_durable(logged(plain)) and not child.is_durable(print)


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("nosuchmodule:main", ModuleNotFoundError),
        ("made:missing", AttributeError),
        ("made:number", TypeError),
        ("made:later", TypeError),
        ("broken:main", ZeroDivisionError),
    ],
)
def test_what_is_no_handler(project: Path, place: str, error: type[Exception]) -> None:
    (project / "made.py").write_text("number = 1\nasync def later(event, context): ...\n")
    (project / "broken.py").write_text("1 / 0\n")
    with pytest.raises(error):
        child.load(place)


def test_a_handler_may_be_a_method(project: Path) -> None:
    (project / "made.py").write_text("class App:\n    @staticmethod\n    def main(event, context):\n        return event\n")
    assert child.load("made:App.main")(7, None) == 7


def of(project: Path, module: str) -> str:
    for name in [name for name, found in sys.modules.items() if str(project) in str(getattr(found, "__file__", ""))]:
        del sys.modules[name]
    child.load(f"{module}:main")
    return child.digest(module)


def test_the_digest_is_of_what_the_handler_loads_of_its_own_project(project: Path) -> None:
    """A worker says which code it runs, so that the server sees a changed one (durable: rule 11)."""
    (project / "app.py").write_text("import helper\ndef main(event, context): ...\n")
    (project / "helper.py").write_text("a = 1\n")
    (project / "other.py").write_text("a = 1\n")
    first = of(project, "app")
    (project / "other.py").write_text("a = 2\n")
    assert of(project, "app") == first
    (project / "helper.py").write_text("a = 22\n")
    changed = of(project, "app")
    assert changed != first
    (project / "app.py").write_text("import helper\ndef main(event, context): return 1\n")
    assert of(project, "app") not in {first, changed}


def test_the_digest_of_a_package_has_its_other_modules(project: Path) -> None:
    package = project / "shop" / "orders"
    package.mkdir(parents=True)
    (project / "shop" / "__init__.py").write_text("")
    (project / "shop" / "prices.py").write_text("a = 1\n")
    (package / "__init__.py").write_text("from shop import prices\ndef main(event, context): ...\n")
    first = of(project, "shop.orders")
    (project / "shop" / "prices.py").write_text("a = 22\n")
    assert of(project, "shop.orders") != first


def test_an_answer_is_json() -> None:
    assert child.invoke(lambda event, _: {"b": event["a"]}, JOB) == {"type": "answered", "body": '{"b": 1}'}


@pytest.mark.parametrize("result", [{1, 2}, float("nan"), object()])
def test_what_is_not_json_is_no_answer(result: Any, capfd: pytest.CaptureFixture[str]) -> None:
    told = child.invoke(lambda *_: result, JOB)
    assert (told["type"], told["error"]) == ("invalid", "Runtime.MarshalError")
    assert "is not JSON" in told["message"] and "is not JSON" in capfd.readouterr().err


def test_an_error_is_told_with_its_own_stack(capfd: pytest.CaptureFixture[str]) -> None:
    def broken(event: Any, context: Any) -> None:
        raise LookupError("no such order")

    told = child.invoke(broken, JOB)
    assert (told["type"], told["error"], told["message"]) == ("raised", "LookupError", "no such order")
    assert "in broken" in told["stack"][0] and len(told["stack"]) == 1
    assert "LookupError: no such order" in capfd.readouterr().err


def test_the_context_is_as_lambdas() -> None:
    context = child.Context(JOB)
    assert (context.aws_request_id, context.function_name, context.invoked_function_arn) == ("r-1", "main", "arn:main")
    assert context.function_version == "$LATEST" and 0 < context.get_remaining_time_in_millis() <= 60_000
    assert child.Context({**JOB, "timeout_s": -1}).get_remaining_time_in_millis() == 0
