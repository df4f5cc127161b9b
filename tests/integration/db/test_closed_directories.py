"""The embedded database of a root server that is installed below a directory closed to everybody else, as ``/root`` is."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import psycopg
import pytest

from perdure.db import embedded


def _share(source: str, copy: str) -> None:
    try:
        Path(copy).hardlink_to(source)
    except OSError:  # another file system
        shutil.copy2(source, copy)


async def test_it_starts_and_opens_no_directory(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = embedded.binaries().parents[1]
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    for part in (wheel, wheel.with_name(wheel.name + ".libs")):
        shutil.copytree(part, closed / part.name, copy_function=_share)
    monkeypatch.setattr(embedded, "binaries", lambda: closed / wheel.name / f"pginstall{embedded.MAJOR}" / "bin")
    postgres = embedded.EmbeddedPostgres(home)
    url = await postgres.start()
    try:
        with psycopg.connect(url) as connection:
            assert connection.execute("select 1").fetchone() == (1,)
    finally:
        await postgres.stop()
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700
