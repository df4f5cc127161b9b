"""Uploads in pieces, on the guest's side."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from pathlib import Path

import pytest

from perdure.guest import uploads
from perdure.guest.worker import Refusal
from perdure.wire.guest.ops import UPLOAD_KEPT_S, Code, Op
from tests.unit.guest.talking import do, sent

ID = "upl_0123456789"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(uploads, "UPLOADS_DIR", str(tmp_path / "uploads"))
    return tmp_path / "uploads"


def begin(upload: str = ID, **fields: object) -> int:
    return int(do(Op.UPLOAD, id=upload, do="begin", **fields).answer["offset"])


def append(offset: int, *pieces: bytes) -> None:
    do(Op.APPEND, sent(*pieces), id=ID, offset=offset)


def finish(path: Path, data: bytes, **fields: object) -> None:
    wanted = {"length": len(data), "sha256": hashlib.sha256(data).hexdigest(), **fields}
    do(Op.FINISH, id=ID, path=str(path), **wanted)


def test_pieces_become_a_file_in_one_step(tmp_path: Path, place: Path) -> None:
    target = tmp_path / "target"
    target.write_text("old")
    target.chmod(0o751)
    assert begin(path=str(target)) == 0
    append(0, b"one ", b"two ")
    assert target.read_text() == "old"
    assert begin() == 8, "taken up, not begun anew"
    append(8, b"three")
    finish(target, b"one two three")
    assert target.read_bytes() == b"one two three"
    assert stat.S_IMODE(target.stat().st_mode) == 0o751, "the mode of what it replaces"
    assert list(place.iterdir()) == []
    finish(target, b"one two three")  # whoever did not hear the answer may ask again
    with pytest.raises(Refusal, match="no upload"):
        finish(target, b"something else")


def test_what_arrived_stays_when_it_breaks_off() -> None:
    begin()
    with pytest.raises(IndexError):  # nothing more comes
        do(Op.APPEND, [b"half of "], id=ID, offset=0)
    assert do(Op.UPLOAD, id=ID, do="look").answer == {"offset": 8}
    append(8, b"it")


def test_a_piece_that_is_not_what_was_sent_is_thrown_away() -> None:
    begin()
    append(0, b"good")
    with pytest.raises(Refusal, match="not what was sent"):
        do(Op.APPEND, [b"bad", {"length": 3, "crc32": 1}], id=ID, offset=4)
    assert begin() == 4


@pytest.mark.parametrize("offset", [0, 3, 5, None, "4"])
def test_another_offset_than_the_end_is_refused(offset: object) -> None:
    begin()
    append(0, b"four")
    with pytest.raises(Refusal, match="has 4 bytes") as refused:
        do(Op.APPEND, sent(b"x"), id=ID, offset=offset)
    assert refused.value.code == Code.CONFLICT


def test_one_writer_at_a_time(place: Path) -> None:
    begin()
    with (place / ID).open("r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for work in (lambda: append(0, b"x"), lambda: finish(place / "x", b"")):
            with pytest.raises(Refusal) as refused:
                work()
            assert refused.value.code == Code.BUSY
    append(0, b"x")


@pytest.mark.parametrize(("fields", "says"), [({"length": 4}, "has 3 bytes"), ({"sha256": "ab" * 32}, "SHA-256")])
def test_what_is_not_whole_gets_no_name(tmp_path: Path, fields: dict[str, object], says: str) -> None:
    begin()
    append(0, b"abc")
    with pytest.raises(Refusal, match=says) as refused:
        finish(tmp_path / "target", b"abc", **fields)
    assert refused.value.code == Code.CONFLICT
    assert not (tmp_path / "target").exists()


def test_what_cannot_be_replaced_is_told_before_anything_is_sent(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="is a directory"):
        begin(path=str(tmp_path))
    assert not (tmp_path / "uploads" / ID).exists()


@pytest.mark.parametrize("upload", ["", "upl_", "upl_../../etc", "x", None, "upl_" + "a" * 65])
def test_ids_are_plain(upload: object) -> None:
    with pytest.raises(Refusal) as refused:
        do(Op.UPLOAD, id=upload, do="begin")
    assert refused.value.code == Code.INVALID


def test_what_nothing_came_of_is_removed_and_what_is_dropped_too(place: Path) -> None:
    begin("upl_staleupload")
    old = (place / "upl_staleupload").stat().st_mtime - UPLOAD_KEPT_S - 1
    os.utime(place / "upl_staleupload", (old, old))
    begin()
    assert [path.name for path in place.iterdir()] == [ID]
    do(Op.UPLOAD, id=ID, do="drop")
    do(Op.UPLOAD, id=ID, do="drop")
    assert list(place.iterdir()) == []
    with pytest.raises(Refusal) as refused:
        do(Op.UPLOAD, id=ID, do="look")
    assert refused.value.code == Code.NOT_FOUND


def test_another_file_system_gets_a_copy_that_appears_whole(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, target = os.rename, tmp_path / "target"

    def rename(source: str, destination: str) -> None:
        if str(source).startswith(str(place)):
            raise OSError(18, os.strerror(18))
        real(source, destination)

    monkeypatch.setattr(uploads.os, "rename", rename)
    data = os.urandom(600_000)
    begin()
    append(0, data)
    finish(target, data, mode=0o640)
    assert (target.read_bytes(), stat.S_IMODE(target.stat().st_mode)) == (data, 0o640)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target", "uploads"]
    assert list(place.iterdir()) == []
