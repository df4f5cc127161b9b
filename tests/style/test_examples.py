"""Every public method of the SDK shows how it is used: ``tests/integration/api/test_examples.py`` runs what it shows."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.style.source import ROOT

SDK = ROOT / "src/perdure/sdk/_async"
#: Public for the SDK's own modules: what carries calls, and what keeps their answers.
PLUMBING = {
    *(f"AsyncClient.{name}" for name in ("request", "fetch", "pages", "send", "stream", "ndjson")),
    *("AsyncHistory.note", "AsyncHistory.fetch", "AsyncCommandHandle.still_running", "AsyncCommands.start_pty"),
}


def public_methods() -> Iterator[tuple[str, str]]:
    """Name and docstring; a property says what it is in its own name."""
    for path in sorted(SDK.glob("*.py")):
        for kind in ast.parse(path.read_text()).body:
            if isinstance(kind, ast.ClassDef) and not kind.name.startswith("_"):
                yield kind.name, ast.get_docstring(kind) or ""
                for member in kind.body:
                    if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and not member.name.startswith("_"):
                        decorators = {ast.unparse(one) for one in member.decorator_list}
                        if not decorators & {"property", "overload"}:
                            yield f"{kind.name}.{member.name}", ast.get_docstring(member) or ""


METHODS = dict(public_methods())
#: Classes that are made by another one's methods, where their use is shown.
SHOWN_ELSEWHERE = {"AsyncCommands", "AsyncFiles", "AsyncHistory", "AsyncPorts", "AsyncPtys"}


@pytest.mark.parametrize("name", sorted(METHODS.keys() - PLUMBING - SHOWN_ELSEWHERE))
def test_it_has_an_example(name: str) -> None:
    assert ">>> " in METHODS[name], f"{name} needs a short example in its docstring (lines that begin with >>>)"


def test_nothing_is_excused_that_is_not_there() -> None:
    assert METHODS.keys() >= PLUMBING | SHOWN_ELSEWHERE
