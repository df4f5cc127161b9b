"""Who may build without root."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.images.bootstrap import Mode, has_subordinate_ids


@pytest.mark.parametrize(
    ("text", "enough"),
    [
        ("alice:100000:65536\n", True),
        ("1000:100000:65536\n", True),
        ("bob:1:65536\nalice:100000:100000\n", True),
        ("alice:100000:1000\n", False),
        ("bob:100000:65536\n", False),
        ("# nothing\n\nalice:1\n", False),
        ("", False),
    ],
)
def test_enough_subordinate_ids(tmp_path: Path, text: str, enough: bool) -> None:
    (tmp_path / "subuid").write_text(text)
    assert has_subordinate_ids(tmp_path / "subuid", ("alice", "1000")) is enough


def test_no_file_means_no_ids(tmp_path: Path) -> None:
    assert not has_subordinate_ids(tmp_path / "subuid", ("alice",))


def test_root_needs_no_namespace_to_own_files() -> None:
    assert Mode.ROOT.as_root == []
    assert Mode.UNSHARE.as_root[0] == "unshare"
