"""The tree under check: which files there are, parsed once, and what each rule found in them."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.style.allow import ALLOW

ROOT = Path(__file__).resolve().parents[2]
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Finding:
    """One place that breaks a rule. ``function`` is the qualified name around it, empty at module level."""

    file: str
    line: int
    function: str
    text: str

    @property
    def places(self) -> tuple[str, str]:
        return self.file, f"{self.file}::{self.function}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}" + (f" (in {self.function})" if self.function else "")


@cache
def files(*suffixes: str, below: str = "") -> tuple[Path, ...]:
    """Files that git tracks or would track, so that a new file is checked before its first commit."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", below or "."]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    paths = (ROOT / name for name in sorted(set(listed.split("\0"))) if name)
    return tuple(path for path in paths if path.is_file() and (not suffixes or path.suffix in suffixes))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@dataclass(frozen=True)
class Place:
    """A node with the chain of functions and classes around it."""

    node: ast.AST
    scopes: tuple[ast.AST, ...]

    @property
    def function(self) -> str:
        return ".".join(getattr(scope, "name", "") for scope in self.scopes)

    def finding(self, path: Path, text: str) -> Finding:
        return Finding(relative(path), getattr(self.node, "lineno", 1), self.function, text)


@cache
def places(path: Path) -> tuple[Place, ...]:
    """Every node of a file with its scopes; a function's own node lies inside its own scope."""

    def walk(node: ast.AST, scopes: tuple[ast.AST, ...]) -> Iterator[Place]:
        inner = (*scopes, node) if isinstance(node, FunctionNode | ast.ClassDef) else scopes
        yield Place(node, inner)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inner)

    return tuple(walk(tree(path), ()))


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute chain of names, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def excuse(rule: str, found: list[Finding]) -> tuple[list[Finding], list[str]]:
    """What the allow list does not cover, and the entries of the list that cover nothing."""
    allowed = ALLOW[rule]
    left = [finding for finding in found if not any(place in allowed for place in finding.places)]
    used = {place for finding in found for place in finding.places}
    stale = [place for place in allowed if place not in used]
    return left, [f"tests/style/allow.py excuses {place!r} from {rule!r}, which needs no excuse" for place in stale]
