"""A fresh node for each test, and the RAM that a page log lies on."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.snapshots.baseram import BaseRam
from tests.fakes.base_ram import make_base
from tests.fakes.tiny_node import Node


@pytest.fixture(params=[False, True], ids=["", "soft-dirty"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Node:
    """On a host that cannot tell what machines write, and on one that can."""
    node = Node(tmp_path, tells_writes=request.param)
    assert node.store.open().debris == ()
    return node


@pytest.fixture
def base(tmp_path: Path) -> BaseRam:
    return make_base(tmp_path)
