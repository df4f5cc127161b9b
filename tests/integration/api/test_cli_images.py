"""``perdure image`` against a real server over fake services."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes.api_server import FakeServer
from tests.integration.api.test_cli import Run, perdure

__all__ = ["perdure"]


def test_images(perdure: Run, tmp_path: Path) -> None:
    built = perdure("image build")
    assert (built.out, built.err) == ("base abababababab is ready\n", "packages\n")
    listed = perdure("image ls")
    header, base, node = listed.out.splitlines()
    assert header.split() == ["NAME", "DIGEST", "MEMORY", "DISK", "STORED", "BUILT"]
    assert base.startswith("base  abababababab")
    assert node.split() == ["node", "not", "built", "1024", "MiB", "8", "GiB"]
    assert listed.err == "'perdure image build node' builds what is not built yet.\n"
    documents = perdure("image ls --json").json
    assert [one["name"] for one in documents["images"]] == ["base"]
    assert {one["name"]: one["built"] for one in documents["recipes"]} == {"base": True, "node": False}
    lines = [json.loads(line) for line in perdure("image build --if-missing --json").out.splitlines()]
    assert [line["type"] for line in lines] == ["step", "log", "done"]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("broken = true")
    assert "The command 'make' failed" in perdure("image build", str(recipe)).err
    missing = perdure("image build /missing.toml").err
    assert missing.startswith("Error: The recipe '/missing.toml' cannot be read: No such file")
    assert "perdure image build dev" in missing
    assert perdure("image rm base").out == "base is removed\n"


def test_image_build_sends_the_files_that_a_recipe_names(perdure: Run, server: FakeServer, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "motd").write_bytes(b"\xff\x00")
    recipe.write_text('name = "x"\n[files."/etc/motd"]\nsource = "sub/motd"\n')
    assert perdure("image build --name mine", str(recipe)).code == 0
    asked = server.images.asked
    assert asked is not None
    assert (asked.recipe, asked.source_bytes, asked.name) == (recipe.read_text(), {"sub/motd": b"\xff\x00"}, "mine")
    perdure("image build dev")
    assert server.images.asked is not None
    assert (server.images.asked.shipped, server.images.asked.recipe) == ("dev", None)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("none", "The source 'none' of the file /m cannot be read: No such file or directory."),
        ("sub", "The source 'sub' of the file /m is not a file."),
        ("huge", "The source 'huge' of the file /m is too large: all sources of a recipe together may have 2 MiB."),
    ],
)
def test_sources_that_cannot_be_sent(perdure: Run, server: FakeServer, tmp_path: Path, source: str, says: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "huge").write_bytes(bytes((2 << 20) + 1))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'name = "x"\n[files."/m"]\nsource = "{source}"\n')
    answer = perdure("image build", str(recipe))
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith(f"Error: {says}\n")
    assert server.images.asked is None


def test_old_images_are_marked_and_pruned(perdure: Run, server: FakeServer) -> None:
    old = server.images.images["base"].model_copy(update={"digest": "cd" * 32, "current": False})
    server.images.images["old"] = old
    listed = perdure("image ls")
    assert "base (old)  cdcdcdcdcdcd" in listed.out
    assert "perdure image prune" in listed.err
    assert perdure("image prune").out == "base cdcdcdcdcdcd is removed\n5.0 MB are free again\n"
    assert perdure("image prune").out == "There is nothing to remove.\n"
    assert perdure("image prune --json").json == {"removed": [], "kept": [], "freed_bytes": 0}
