"""Documents name tests as proofs: each of them exists, and every promise of the durability page has one."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/durability.md"
_PROOF = re.compile(r"(tests/[\w/]+\.py)::(\w+)")


@cache
def functions(path: Path) -> frozenset[str]:
    if not path.is_file():
        return frozenset()
    nodes = ast.walk(ast.parse(path.read_text()))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def missing(text: str) -> list[str]:
    return [f"{path}::{name}" for path, name in _PROOF.findall(text) if name not in functions(ROOT / path)]


def rows(text: str) -> list[str]:
    """Rows of tables that are no heads."""
    lines = text.splitlines()
    heads = {at - 1 for at, line in enumerate(lines) if line.startswith("|---")}
    return [line for at, line in enumerate(lines) if line.startswith("| ") and at not in heads]


@pytest.mark.parametrize("document", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.name)
def test_every_test_that_a_document_names_exists(document: Path) -> None:
    assert missing(document.read_text()) == []


def test_every_promise_names_a_test_that_proves_it() -> None:
    found = rows(PAGE.read_text())
    assert len(found) > 15
    assert [row for row in found if not _PROOF.search(row)] == []


def test_a_test_that_is_gone_is_missed() -> None:
    here = Path(__file__).relative_to(ROOT)
    text = f"`{here}::test_a_test_that_is_gone_is_missed` `{here}::test_of_yore` `tests/none.py::test_x`"
    assert missing(text) == [f"{here}::test_of_yore", "tests/none.py::test_x"]


def test_a_promise_without_a_proof_is_seen() -> None:
    text = "| after | proof |\n|---|---|\n| `create` | nothing |\n"
    assert rows(text) == ["| `create` | nothing |"]
