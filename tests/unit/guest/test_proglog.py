"""The kept end of a program's output: against a model that keeps everything."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.guest.progfile import may_exist, understand
from perdure.guest.proglog import LogFile
from perdure.wire.guest import ops
from perdure.wire.node import programs

LIMIT = 64


def whole(log: LogFile, offset: int) -> tuple[int, bytes]:
    """(bytes lost before it, everything from an offset on)."""
    lost, data = log.read(offset, 7)
    content, at = data, offset + lost + len(data)
    while data:
        gap, data = log.read(at, 7)
        assert gap == 0
        content, at = content + data, at + len(data)
    return lost, content


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=30), st.integers(0, 8))
def test_the_end_is_kept_under_its_offsets(pieces: list[bytes], reopened: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        log, everything = LogFile(directory, LIMIT), b""
        for count, piece in enumerate(pieces):
            if reopened and count % reopened == 0:
                log.close()
                log = LogFile(directory, LIMIT)  # as an agent that starts anew finds it
            log.append(piece)
            everything += piece
        assert log.end == len(everything)
        assert log.end - log.start <= LIMIT + 2 * 40
        assert log.end - log.start >= min(len(everything), LIMIT // 2)
        assert whole(log, log.start) == (0, everything[log.start :])
        assert whole(log, 0) == (log.start, everything[log.start :])
        assert log.read(log.end, 100) == (0, b"")
        assert len(list(Path(directory).iterdir())) <= 2
        log.close()


@given(st.lists(st.sampled_from([b"a\n", b"bb\n", b"\n", b"c", b"dd\nee\n"]), max_size=40), st.integers(0, 12))
def test_a_tail_begins_where_the_last_lines_do(pieces: list[bytes], lines: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        log, everything = LogFile(directory, LIMIT), b""
        for piece in pieces:
            log.append(piece)
            everything += piece
        kept = everything[log.start :]
        wanted = b"".join(kept.splitlines(keepends=True)[-lines:]) if lines else b""
        assert everything[log.tail(lines) :] == wanted
        log.close()


def test_a_full_place_drops_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LogFile(str(tmp_path), LIMIT)
    log.append(b"kept")

    def full(*_: object) -> int:
        raise OSError(28, "no space")

    with monkeypatch.context() as patched:
        patched.setattr("perdure.guest.proglog.os.write", full)
        log.append(b"lost")
    log.append(b" too")
    assert whole(log, 0) == (0, b"kept too")
    log.close()


def test_both_sides_have_the_same_words() -> None:
    """The clients' side may not import the guest's."""
    assert {value for name, value in vars(ops.ProgramState).items() if name.isupper()} == set(programs.ProgramState)
    assert (ops.PROGRAM_PORT, ops.PROGRAM_STOP_GRACE_S) == (programs.PROGRAM_PORT, programs.PROGRAM_STOP_GRACE_S)
    assert ops.PROGRAM_FILE_BYTES == programs.PROGRAM_FILE_BYTES


def test_a_file_of_the_host_is_understood_as_it_was_meant() -> None:
    spec = programs.ProgramSpec(("a", "b c", "ü"), {"N": "ü"}, "/x", "u", 9, programs.Restart.NEVER, 1.5)
    program, problem = understand(spec.to_file())
    assert problem == "" and program is not None
    assert programs.ProgramSpec(**{**program, "argv": tuple(program["argv"]), "restart": programs.Restart.NEVER}) == spec


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"nonsense",
        b"[]",
        b"{}",
        b'{"argv": []}',
        b'{"argv": [""]}',
        b'{"argv": ["a\\u0000"]}',
        b'{"argv": ["a"], "env": {"A=": "b"}}',
        b'{"argv": ["a"], "env": {"A": 1}}',
        b'{"argv": ["a"], "port": true}',
        b'{"argv": ["a"], "port": 0}',
        b'{"argv": ["a"], "restart": "sometimes"}',
        b'{"argv": ["a"], "restart": ["always"]}',
        b'{"argv": ["a"], "stop_grace_s": NaN}',
        b'{"argv": ["a"], "stop_grace_s": -1}',
        b'{"argv": ["a"], "cwd": 3}',
        b"\xff\xfe",
        b"[" * 19_000,
        ('{"argv": ["' + "ü" * 9_000 + '"]}').encode(),
    ],
)
def test_what_names_no_program_is_told_and_does_no_harm(text: bytes) -> None:
    program, problem = understand(text)
    assert program is None and problem.endswith(".")


def test_a_program_may_be_named_only_where_its_file_or_a_link_is(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    assert not may_exist(str(tmp_path))
    (tmp_path / "etc/perdure").mkdir()
    assert not may_exist(str(tmp_path))
    (tmp_path / "etc/perdure/program.json").symlink_to("nowhere")
    assert may_exist(str(tmp_path))
    (tmp_path / "etc/perdure/program.json").unlink()
    (tmp_path / "etc/perdure/program.json").write_text("{}")
    assert may_exist(str(tmp_path))
