"""The import contracts of pyproject.toml (DESIGN section 3) hold, and each of them catches an import planted against it."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.style.source import ROOT, files, relative, tree

#: contract -> (module, import planted into it)
PLANTED = {
    "Lower layers never import higher ones": ("core/planted.py", "import perdure.workspaces"),
    "What runs on a node never reaches the database": ("machines/planted.py", "import psycopg"),
    "The control plane meets the node only in wire": ("fleet/planted.py", "import perdure.gateway"),
    "Pure modules do no I/O and read no clock": ("workspaces/lifecycle.py", "import asyncio"),
    "The guest's code shares nothing with the server but wire.guest": ("guest/planted.py", "import perdure.core"),
    "SDK and command line know the server by its API only": ("sdk/planted.py", "import perdure.workspaces.model"),
    "The server does not know its clients": ("api/planted.py", "import perdure.sdk"),
}


def lint(source: Path, cache: Path) -> str:
    command = [Path(sys.executable).parent / "lint-imports", ROOT / "pyproject.toml", "--cache-dir", cache]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(command, cwd=cache, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_the_contracts_hold(tmp_path: Path) -> None:
    said = lint(ROOT / "src", tmp_path)
    assert re.search(r"Contracts: \d+ kept, 0 broken", said), said


def test_each_contract_catches_a_planted_import(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for place, statement in PLANTED.values():
        with (tmp_path / "src/perdure" / place).open("a") as module:
            module.write(f"\n{statement}\n")
    said = lint(tmp_path / "src", tmp_path)
    broken = set(re.findall(r"^(.+) BROKEN(?: \(.*\))?$", said, re.MULTILINE))
    assert broken == set(PLANTED), said


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}: relative import; the guest's copy of the package has fewer parents"
            names.add(node.module or "")
    return names


def guest_files() -> list[Path]:
    return [path for path in files(".py", below="src/perdure") if re.match(r"src/perdure/(guest/|wire/guest)", relative(path))]


def test_guest_code_imports_the_standard_library_only() -> None:
    own = ("perdure.guest", "perdure.wire.guest")
    foreign = {
        (relative(path), name)
        for path in guest_files()
        for name in imported(path)
        if name.split(".")[0] not in sys.stdlib_module_names and not name.startswith(own)
    }
    assert guest_files() and not foreign


def test_guest_code_loads_without_any_installed_package() -> None:
    """As in a workspace: an isolated Python that sees the standard library and our sources, nothing else."""
    modules = [relative(path).removeprefix("src/").removesuffix(".py").replace("/", ".") for path in guest_files()]
    modules = [module.removesuffix(".__init__") for module in modules if not module.endswith((".start", "__main__"))]
    code = f"import sys; sys.path.append({str(ROOT / 'src')!r})\nfor name in {modules!r}: __import__(name)\n"
    code += "print([name for name in sys.modules if name.split('.')[0] in ('pydantic', 'numpy', 'httpx2')])"
    done = subprocess.run([sys.executable, "-I", "-S", "-B", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip() == "[]", done.stderr


def test_the_client_imports_the_server_only_inside_functions() -> None:
    """``perdure ls`` must not load the server: the command line reaches wiring and the demo lazily."""
    eager = [
        f"{relative(path)}:{node.lineno}"
        for path in files(".py", below="src/perdure/cli")
        for node in tree(path).body
        if isinstance(node, ast.Import | ast.ImportFrom) and "perdure.wiring" in ast.unparse(node)
    ]
    assert not eager
