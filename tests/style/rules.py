"""The house rules (DESIGN section 6) as functions over parsed source: each yields what breaks it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.style.source import Finding, FunctionNode, Place, dotted, files, places, relative

FUNCTION_LINES = 60
FILE_LINES = 500
PARAMETERS = 6
#: Written by a tool; the written source is checked instead.
GENERATED = "src/perdure/sdk/_sync/"

PROCESS_CALLS = re.compile(
    r"^(subprocess\.\w+|asyncio\.create_subprocess_\w+|\w*loop\.subprocess_\w+|os\.(system|popen|fork|forkpty|exec\w+|spawn\w+|posix_spawnp?))$"
)
ENVIRONMENT = re.compile(r"^os\.(environ|environb|getenv|getenvb|putenv|unsetenv)\b")
WALL_CLOCK = re.compile(r"^(datetime\.)?(datetime|date)\.(now|utcnow|today)$|^time\.(time|time_ns|ctime|localtime|gmtime)$")
SQL = re.compile(
    r"^\s*(select\s.+\sfrom\s|insert\s+into\s|update\s+\S+\s+set\s|delete\s+from\s|merge\s+into\s|truncate\s|with\s+\w+\s+as\s*\("
    r"|(create|alter|drop)\s+(or\s+replace\s+)?(table|index|unique|function|database|schema|role|type|trigger)\s|notify\s+\S+|set\s+(local|session)\s)",
    re.IGNORECASE | re.DOTALL,
)
SQL_CLOCK = re.compile(
    r"\bnow\s*\(\s*\)|\b(clock|statement|transaction)_timestamp\s*\("
    r"|\bcurrent_(timestamp|date|time)\b|\blocal(time|timestamp)\b",
    re.IGNORECASE,
)
SQL_WORD = re.compile(r"\b(select|insert|update|delete|create|alter|default|where)\b", re.IGNORECASE)
NOW_DEFINITION = re.compile(
    r"create\s+(or\s+replace\s+)?function\s+(\w+\.)?perdure_now\b.*?\$(\w*)\$.*?\$\3\$", re.IGNORECASE | re.DOTALL
)
STATES = {"creating", "running", "hibernating", "hibernated", "waking", "failed", "deleted"}
STATES |= {"prepared", "paused", "paused_no_space", "dead"}  # of machines


def python(*, src_only: bool) -> Iterator[Path]:
    for path in files(".py", below="src" if src_only else ""):
        if not relative(path).startswith(GENERATED):
            yield path


def calls_and_names(path: Path, pattern: re.Pattern[str], what: str) -> Iterator[Finding]:
    """Uses of a dotted name, and imports that would hide it from this rule (``from time import sleep``)."""
    for place in places(path):
        node = place.node
        if isinstance(node, ast.Attribute) and pattern.match(dotted(node)):
            yield place.finding(path, f"{dotted(node)}: {what}")
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if pattern.match(f"{node.module}.{alias.name}"):
                    yield place.finding(path, f"from {node.module} import {alias.name}: {what}")


def environment() -> Iterator[Finding]:
    for path in python(src_only=True):
        yield from calls_and_names(path, ENVIRONMENT, "only core/config.py reads the environment; take the value as an argument")


def process() -> Iterator[Finding]:
    for path in python(src_only=True):
        yield from calls_and_names(path, PROCESS_CALLS, "processes are started in few named modules only")


def sleep() -> Iterator[Finding]:
    """``time.sleep`` anywhere, ``asyncio.sleep`` of anything but 0: wait for an event with a deadline instead."""
    for path in python(src_only=False):
        yield from calls_and_names(path, re.compile(r"^time\.sleep$"), "wait for an event with a deadline")
        for place in places(path):
            node = place.node
            if not (isinstance(node, ast.Call) and dotted(node.func) == "asyncio.sleep" and node.args):
                continue
            if not (isinstance(node.args[0], ast.Constant) and node.args[0].value == 0):
                yield place.finding(path, "asyncio.sleep: wait for an event with a deadline")


def wall_clock() -> Iterator[Finding]:
    for path in python(src_only=True):
        yield from calls_and_names(path, WALL_CLOCK, "take the time from a Clock or as an argument")


def broad_except() -> Iterator[Finding]:
    for path in python(src_only=True):
        for place in places(path):
            node = place.node
            if not isinstance(node, ast.ExceptHandler):
                continue
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            broad = any(kind is None or dotted(kind) in {"Exception", "BaseException"} for kind in kinds)
            if broad and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                yield place.finding(path, "except Exception without raise: only the top of a task may, and it records a state")


def built_sql() -> Iterator[Finding]:
    """Statements made by formatting: f-strings, ``%``, ``format`` and ``+`` on text that begins like SQL."""
    for path in python(src_only=True):
        for place in places(path):
            node, text = place.node, None
            if isinstance(node, ast.JoinedStr) and any(isinstance(part, ast.FormattedValue) for part in node.values):
                text = "".join(part.value if isinstance(part, ast.Constant) else " x " for part in node.values)
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod | ast.Add) and isinstance(node.left, ast.Constant):
                text = node.left.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
                text = node.func.value.value if isinstance(node.func.value, ast.Constant) else None
            if isinstance(text, str) and SQL.match(text):
                yield place.finding(path, "SQL built by formatting: put it into a named query with parameters")


def sql_clock() -> Iterator[Finding]:
    """The database's clock outside the definition of ``perdure_now()``, in SQL files and in SQL inside Python."""
    what = "read time through perdure_now(), which tests can shift"
    for path in files(".sql"):
        code = re.sub(r"--[^\n]*", lambda match: " " * len(match[0]), path.read_text())
        code = NOW_DEFINITION.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), code)
        for match in SQL_CLOCK.finditer(code):
            yield Finding(relative(path), code.count("\n", 0, match.start()) + 1, "", f"{match[0]}: {what}")
    for path in python(src_only=True):
        for place in places(path):
            node = place.node
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)) or _is_docstring(node, place):
                continue
            text = NOW_DEFINITION.sub("", node.value)
            if re.search(
                r"\b(select|insert|update|delete|create|alter|default|where)\b", text, re.IGNORECASE
            ) and SQL_CLOCK.search(text):
                yield place.finding(path, f"the database's clock: {what}")


def _is_docstring(node: ast.Constant, place: Place) -> bool:
    return any(isinstance(scope, FunctionNode | ast.ClassDef) and scope.body[0].lineno == node.lineno for scope in place.scopes)


def state_literal() -> Iterator[Finding]:
    for path in python(src_only=True):
        for place in places(path):
            node = place.node
            if not isinstance(node, ast.Compare):
                continue
            sides = [node.left, *node.comparators]
            named = any("state" in dotted(side).rsplit(".", 1)[-1] for side in sides)
            if named and any(isinstance(side, ast.Constant) and side.value in STATES for side in sides):
                yield place.finding(path, "a state compared with text: parse it into its enum at the edge")


def function_length() -> Iterator[Finding]:
    for path in python(src_only=False):
        for place in places(path):
            node = place.node
            if isinstance(node, FunctionNode):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    yield place.finding(path, f"{lines} lines, {FUNCTION_LINES} allowed: split the function")


def file_length() -> Iterator[Finding]:
    for path in files(".py", ".sh", ".sql"):
        lines = len(path.read_text().splitlines())
        if lines > FILE_LINES and not relative(path).startswith(GENERATED):
            yield Finding(relative(path), 1, "", f"{lines} lines, {FILE_LINES} allowed: split the module into a package")


def parameters() -> Iterator[Finding]:
    """Public functions; a route or a command, whose signature a framework reads, has one parameter per input."""
    for path in python(src_only=True):
        framework = relative(path).startswith(("src/perdure/api/", "src/perdure/cli/"))
        for place in places(path):
            node = place.node
            if not isinstance(node, FunctionNode) or (framework and (node.decorator_list or _is_command(node))):
                continue
            if any(
                getattr(scope, "name", "").startswith("_") and getattr(scope, "name", "") != "__init__" for scope in place.scopes
            ):
                continue
            names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len([name for name in names if name not in {"self", "cls"}])
            if count > PARAMETERS:
                yield place.finding(path, f"{count} parameters, {PARAMETERS} allowed: take a spec object")


def _is_command(node: FunctionNode) -> bool:
    first = next(iter(node.args.args), None)
    return first is not None and first.annotation is not None and dotted(first.annotation) == "typer.Context"


RULES: dict[str, Callable[[], Iterator[Finding]]] = {
    "environment": environment,
    "process": process,
    "sleep": sleep,
    "wall-clock": wall_clock,
    "broad-except": broad_except,
    "built-sql": built_sql,
    "sql-clock": sql_clock,
    "state-literal": state_literal,
    "function-length": function_length,
    "file-length": file_length,
    "parameters": parameters,
}
