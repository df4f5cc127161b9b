"""Runs the blocks of a Markdown document as its reader would, and compares what they print.

``console``   lines that begin with ``$`` are commands for bash; the lines below one are all that it prints, errors included.
              ``...`` stands for anything, within a line or as a line of its own for any number of lines. ``[exit N]`` as the last
              line means that the command is meant to fail so.
``python``    one program; a ``text`` block right after it is what it prints.

Blocks run in order, in one directory. Other languages and blocks without one are for reading only.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

DEADLINE_S = 240
#: Guides that need images besides base, by their file's stem: they run in ``make test-images``.
NEED_IMAGES = {"images": ("node", "browser"), "python": ("python-data",)}
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Step:
    """One command or program, where it stands, and what it must print (None: anything)."""

    line: int
    argv: tuple[str, ...]
    shown: str
    expected: str | None
    exit_code: int = 0


def steps(text: str) -> Iterator[Step]:
    fences = list(_FENCE.finditer(text))
    for position, fence in enumerate(fences):
        language, body = fence[1], fence[2]
        line = text.count("\n", 0, fence.start()) + 2
        if language == "console":
            yield from _console(body, line)
        elif language == "python":
            following = fences[position + 1] if position + 1 < len(fences) else None
            answered = following is not None and following[1] == "text" and not text[fence.end() : following.start()].strip()
            yield Step(line, (sys.executable, "-c", body), "the program", following[2] if following and answered else None)


def _console(body: str, line: int) -> Iterator[Step]:
    command, at, output = None, line, list[str]()
    for offset, text in enumerate([*body.splitlines(), "$ "]):
        if not text.startswith("$ "):
            assert command is not None, f"line {line + offset}: output before the first command"
            output.append(text)
            continue
        if command is not None:
            ending = re.fullmatch(r"\[exit (\d+)\]", output[-1]) if output else None
            expected = "".join(f"{item}\n" for item in (output[:-1] if ending else output))
            yield Step(at, ("bash", "-c", command), command, expected, int(ending[1]) if ending else 0)
        command, at, output = text[2:], line + offset, []


def matches(expected: str, printed: str) -> bool:
    """Whether ``printed`` is ``expected`` with something in place of each ``...``."""
    parts = []
    for line in expected.splitlines():
        parts.append(r"(?:.*\n)*" if line == "..." else ".*".join(map(re.escape, line.split("..."))) + r"\n")
    return re.fullmatch("".join(parts), printed if printed.endswith("\n") or not printed else printed + "\n") is not None


def run(document: Path, directory: Path, environment: Mapping[str, str]) -> int:
    """Run every block; returns how many steps there were. The first that does otherwise than written fails the test."""
    count = 0
    for step in steps(document.read_text()):
        count += 1
        done = subprocess.run(
            step.argv,
            cwd=directory,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=DEADLINE_S,
            check=False,
        )
        printed = done.stdout.decode(errors="replace")
        where = f"{document.name}:{step.line}: {step.shown}"
        assert done.returncode == step.exit_code, f"{where}\nexit {done.returncode}, printed:\n{printed}"
        if step.expected is not None:
            assert matches(step.expected, printed), f"{where}\nmust print:\n{step.expected}\nprinted:\n{printed}"
    return count
