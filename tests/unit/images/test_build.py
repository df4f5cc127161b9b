"""What a build is refused for before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.core import files
from perdure.core.errors import NoSpace
from perdure.images.build import ROOM_BYTES, build_image
from perdure.images.recipe import Recipe
from perdure.images.registry import ImageStore


async def test_without_room_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda _path: ROOM_BYTES - 1)
    store = ImageStore(tmp_path / "images")
    with pytest.raises(NoSpace) as caught:
        await build_image(Recipe(name="large"), store)
    assert caught.value.message == f"Building an image needs 3072 MiB of disk space, but {store.root} has 3071 MiB left."
    assert caught.value.hint and caught.value.retryable
    assert [path for path in store.root.rglob("*") if path.is_file() and path.parent.name != "locks"] == []
