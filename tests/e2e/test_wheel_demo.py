"""What a user without a checkout does: install the wheel into an empty environment, run the demo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.qemu
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_passes_from_an_installed_wheel(wheel: Path, tmp_path: Path, images_dir: Path, base_image: Path) -> None:
    uv = Path(sys.executable).parent / "uv"
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, tmp_path / "venv"], check=True)
    install = [
        uv,
        "pip",
        "install",
        "-q",
        "--python",
        tmp_path / "venv/bin/python",
        "--constraint",
        ROOT / "requirements.lock",
        wheel,
    ]
    subprocess.run(install, check=True)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "PYTHON", "VIRTUAL_ENV"))},
        "PERDURE_HOME": str(tmp_path / "home"),
        "PERDURE_IMAGE_DIR": str(images_dir),
    }
    command = [tmp_path / "venv/bin/perdure", "demo", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["ok"] and told["steps"] and all(step["ok"] for step in told["steps"])
