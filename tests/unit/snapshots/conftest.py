"""A fresh node for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.tiny_node import Node


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path)
    assert node.store.open().debris == ()
    return node
