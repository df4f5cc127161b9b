"""Guides that need other images than base, run as they stand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import documents
from tests.e2e.test_guides import ROOT, environment

__all__ = ["environment"]


@pytest.mark.parametrize("name", documents.NEED_IMAGES)
def test_a_guide_runs_as_it_stands(name: str, built: Callable[[str], str], tmp_path: Path, environment: dict[str, str]) -> None:
    for image in documents.NEED_IMAGES[name]:
        built(image)
    assert documents.run(ROOT / "docs/guides" / f"{name}.md", tmp_path, environment) > 0
