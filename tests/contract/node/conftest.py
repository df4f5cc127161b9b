"""The node suite runs on every bench there is."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.node.benches import Bench, fake_bench


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.qemu)])
async def bench(request: pytest.FixtureRequest, home: Path) -> AsyncIterator[Bench]:
    if request.param == "real":
        request.getfixturevalue("base_image")
        make = importlib.import_module("tests.contract.node.real").real_bench
    else:
        make = fake_bench
    async with make(home) as bench:
        bench.listen()
        yield bench
        bench.deafen()
