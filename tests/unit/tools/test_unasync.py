"""What is written of an async example for the sync surface."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def unasync(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("unasync", repository / "tools/unasync.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("written", "becomes"),
    [
        ('>>> ws = await AsyncWorkspace.connect("a")', '>>> ws = Workspace.connect("a")'),
        (">>> [one async for one in AsyncWorkspace.iterate()]", ">>> [one for one in Workspace.iterate()]"),
        (
            ">>> async with AsyncClient() as client:\n...     (await client.health()).status",
            ">>> with Client() as client:\n...     (client.health()).status",
        ),
        (">>> await client.aclose()", ">>> client.close()"),
        ("Callers await it, and ``async with`` ends.", "Callers await it, and ``with`` ends."),
        ("    >>> await ws.delete()", "    >>> ws.delete()"),
        ("...     async for x in y:", "...     for x in y:"),
        ("... or await something else", "... or something else"),
    ],
)
def test_examples_lose_what_only_async_code_says(unasync: ModuleType, written: str, becomes: str) -> None:
    assert unasync.prose(written) == becomes


def test_a_docstring_in_code_is_converted(unasync: ModuleType) -> None:
    text = 'class AsyncThing:\n    async def do(self) -> None:\n        """Do it.\n\n        >>> await thing.do()\n        """\n'
    made = unasync.convert(text)
    assert "class Thing:" in made and "def do(self)" in made and ">>> thing.do()" in made
    assert "await" not in made and "async" not in made
