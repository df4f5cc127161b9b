"""Before typer sees the command line: where the command of ``exec`` begins, and whether ``--json`` was asked for. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: The first word of what a shell asks at TAB, see ``completion``.
ASKED = "__complete"
#: Options of ``exec`` that take a value.
EXEC_VALUES = frozenset(
    {"--cwd", "--user", "-u", "--env", "-e", "--timeout", "--run-limit", "--idle-limit", "--attach", "--idempotency-key"}
)
PLURALS: Mapping[str, str] = {
    "images": "image",
    "snapshots": "snapshot",
    "branches": "branch",
    "keys": "key",
    "tenants": "tenant",
    "executions": "execution",
    "callbacks": "callback",
    "functions": "function",
    "list": "ls",
}


def prepare(argv: Sequence[str]) -> list[str]:
    """Plural nouns become singular, and ``exec NAME command …`` gets the ``--`` that says where its own options end."""
    words = list(argv)
    index = next((at for at, word in enumerate(words) if not word.startswith("-")), None)
    if index is None:
        return words
    words[index] = PLURALS.get(words[index], words[index])
    return words[: index + 1] + _mark(words[index + 1 :]) if words[index] == "exec" else words


def _mark(words: list[str]) -> list[str]:
    at, named = 0, False
    while at < len(words):
        word = words[at]
        if word == "--":
            return words
        if word in EXEC_VALUES:
            at += 2
        elif word.startswith("-") and word != "-":
            at += 1
        elif not named:
            named = True
            at += 1
        else:
            return [*words[:at], "--", *words[at:]]
    return words


def asks_json(prepared: Sequence[str]) -> bool:
    """Whether ``--json`` stands before any ``--``: for errors in the command line itself."""
    words = list(prepared)
    return "--json" in (words[: words.index("--")] if "--" in words else words)
