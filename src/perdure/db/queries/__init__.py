"""SQL in named files, described, loaded once; Python never builds statements.

A file ``workspaces.sql`` holds statements that begin with ``-- name: get``; such a one is known as ``workspaces.get``. Comment
lines after the name say what it is for. Parameters are psycopg's ``%(name)s``; a literal percent sign is ``%%``.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import LiteralString

_NAME = re.compile(r"^-- name: *([a-z_]+) *$")


def parse(stem: str, text: str) -> dict[str, LiteralString]:
    """Statements of one file by full name. Raises ValueError for text before the first name, or a name used twice."""
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        match = _NAME.match(line)
        if match:
            name = f"{stem}.{match.group(1)}"
            if name in found:
                raise ValueError(f"{name} is defined twice")
            current = found[name] = []
        elif line.startswith("--") or not line.strip():
            continue
        elif current is None:
            raise ValueError(f"{stem}.sql has text before its first '-- name:' line: {line!r}")
        else:
            current.append(line)
    return {name: "\n".join(lines).rstrip(" ;\n") for name, lines in found.items()}


@cache
def load() -> dict[str, LiteralString]:
    """Every statement of every file."""
    found: dict[str, LiteralString] = {}
    for path in sorted(files(__package__).iterdir(), key=lambda path: path.name):
        if path.name.endswith(".sql"):
            found |= parse(path.name.removesuffix(".sql"), path.read_text(encoding="utf-8"))
    return found
