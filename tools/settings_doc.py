"""Write docs/reference/settings.md from perdure.core.config; with --check, fail when the file lags behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from perdure.core.config import Settings

TARGET = Path(__file__).resolve().parent.parent / "docs" / "reference" / "settings.md"
HEAD = """# Settings

Read from the environment when a process starts; lists are comma-separated.
Made by `make fix` from `perdure.core.config`, not edited by hand.

| variable | type | default | meaning |
|---|---|---|---|
"""
DEFAULTS = {"home": "`/var/lib/perdure` for root, else the user's data directory"}


def type_name(annotation: Any) -> str:
    """How an operator would name the type."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is tuple:
        return "list"
    named = [item for item in inner if item is not type(None)]
    if named and all(isinstance(item, str) for item in named):
        return " or ".join(f"`{item}`" for item in named)
    if named:
        return type_name(named[0])
    return {"str": "text", "int": "whole number", "float": "number", "Path": "path", "bool": "true or false"}[annotation.__name__]


def default_text(name: str, info: FieldInfo) -> str:
    if name in DEFAULTS:
        return DEFAULTS[name]
    if info.default is None or info.default == ():
        return "none"
    return f"`{info.default:g}`" if isinstance(info.default, float) else f"`{info.default}`"


def rows() -> Iterator[str]:
    for name, info in Settings.model_fields.items():
        if not info.description:
            raise SystemExit(f"settings_doc: Settings.{name} has no description; every setting says what it is for.")
        yield f"| `PERDURE_{name.upper()}` | {type_name(info.annotation)} | {default_text(name, info)} | {info.description} |\n"


def main(arguments: list[str]) -> int:
    text = HEAD + "".join(rows())
    if arguments == ["--check"]:
        if not TARGET.is_file() or TARGET.read_text() != text:
            print(f"{TARGET.name} lags behind core/config.py: run 'make fix'.", file=sys.stderr)
            return 1
        return 0
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
