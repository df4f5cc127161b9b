#!/usr/bin/env python3
"""Write docs/openapi.json from the application, or with --check fail when it is out of date."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import cast

from perdure.api.app import create_app
from perdure.api.services import Services

TARGET = Path(__file__).resolve().parent.parent / "docs/openapi.json"


def document() -> str:
    """The description of the API; routes need no services to be described."""
    schema = create_app(cast("Services", None)).openapi()
    return json.dumps(schema, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def main() -> int:
    text = document()
    if "--check" in sys.argv[1:]:
        if not TARGET.exists() or TARGET.read_text() != text:
            print("docs/openapi.json is out of date: run 'python tools/openapi.py'.", file=sys.stderr)
            return 1
        return 0
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
