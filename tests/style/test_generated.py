"""Generated files equal what their tools make now."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.style.source import ROOT


@pytest.mark.parametrize("tool", ["settings_doc", "unasync", "openapi"])
def test_generated_files_do_not_lag(tool: str) -> None:
    done = subprocess.run([sys.executable, f"tools/{tool}.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
