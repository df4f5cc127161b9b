"""A fresh node for each test, and the RAM that a page log lies on."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.snapshots.baseram import BaseRam
from tests.fakes.base_ram import make_base
from tests.fakes.tiny_node import Node


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path)
    assert node.store.open().debris == ()
    return node


@pytest.fixture
def base(tmp_path: Path) -> BaseRam:
    return make_base(tmp_path)
