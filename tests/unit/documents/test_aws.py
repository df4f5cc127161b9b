"""The table of AWS's operations says all there are, which scope each needs, and names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from perdure.api import policy
from perdure.api.aws.routes import routes
from perdure.api.aws.tasks import OPERATIONS

ROOT = Path(__file__).parents[3]
_ROW = re.compile(r"^\| (\w+) \|.*\| (\w+) \| `(test_\w+)` \|$", re.MULTILINE)


def test_the_table_is_complete_and_every_test_in_it_exists() -> None:
    rows = {operation: (scope, test) for operation, scope, test in _ROW.findall((ROOT / "docs/aws.md").read_text())}
    needs = {route.operation: policy.AWS[route.name].scope.value for route in routes()}
    of_tasks = needs.pop("SendTask*")
    needs |= dict.fromkeys(OPERATIONS, of_tasks)
    assert {operation: scope for operation, (scope, _) in rows.items()} == needs
    tree = ast.parse((ROOT / "tests/integration/aws/test_operations.py").read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {test for _, test in rows.values()} <= functions
