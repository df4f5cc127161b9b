"""The runner of the guides sees what differs from what is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e import documents

GOOD = """Text.

```console
$ echo one; echo two
one
two
$ echo anything at all
...
$ echo "pid 123 of x"
pid ... of x
$ echo no; exit 3
no
[exit 3]
$ true
```

```
not run
```

```python
print("from python")
```

```text
from python
```
"""


@pytest.mark.parametrize(
    ("expected", "printed", "equal"),
    [
        ("one\n", "one\n", True),
        ("one\n", "one", True),
        ("one\n", "one\ntwo\n", False),
        ("", "", True),
        ("", "noise\n", False),
        ("...\n", "", True),
        ("...\n", "a\nb\n", True),
        ("a\n...\nz\n", "a\nb\nc\nz\n", True),
        ("a\n...\nz\n", "a\nb\nc\n", False),
        ("pid ... of x\n", "pid 1 of y\n", False),
        ("a.c\n", "abc\n", False),
    ],
)
def test_matching(expected: str, printed: str, equal: bool) -> None:
    assert documents.matches(expected, printed) is equal


def test_a_good_document_runs_to_its_end(tmp_path: Path) -> None:
    document = tmp_path / "good.md"
    document.write_text(GOOD)
    assert documents.run(document, tmp_path, os.environ) == 6


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        ("```console\n$ echo two\none\n```\n", "must print"),
        ("```console\n$ false\n```\n", "exit 1"),
        ("```console\n$ true\n[exit 1]\n```\n", "exit 0"),
        ('```python\nprint("x")\n```\n\n```text\ny\n```\n', "must print"),
        ("```python\nraise SystemExit(2)\n```\n", "exit 2"),
    ],
)
def test_a_difference_fails_with_its_place(block: str, complaint: str, tmp_path: Path) -> None:
    document = tmp_path / "bad.md"
    document.write_text("A line.\n\n" + block)
    with pytest.raises(AssertionError, match=complaint) as caught:
        documents.run(document, tmp_path, os.environ)
    assert "bad.md:4:" in str(caught.value)
