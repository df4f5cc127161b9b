"""The public models say what the services say, and paths and keys are judged as documented."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import get_args

import pytest

from perdure.api.keys import ensure_key_file
from perdure.core.errors import HostUnfit, InvalidRequest, PathEscape
from perdure.wire import public
from perdure.wire.node import ExecEnd
from perdure.wire.paths import guest_path
from perdure.workspaces import model


@pytest.mark.parametrize(
    ("ours", "theirs"), [(public.WorkspaceState, model.WorkspaceState), (public.WorkspaceKind, model.WorkspaceKind)]
)
def test_public_enums_are_complete(ours: type[StrEnum], theirs: type[StrEnum]) -> None:
    assert {one.value for one in ours} == {one.value for one in theirs}


@pytest.mark.parametrize(
    ("kind", "field", "theirs"),
    [
        (public.ResumeReport, "disk", model.DiskFate),
        (public.SnapshotInfo, "reason", model.SnapshotReason),
        (public.RecoverWorkspace, "how", model.Recovery),
    ],
)
def test_public_words_are_complete(kind: type[public.Answer], field: str, theirs: type[StrEnum]) -> None:
    assert set(get_args(kind.model_fields[field].annotation)) == {one.value for one in theirs}


def test_public_reasons_to_keep_a_snapshot_are_complete() -> None:
    (words,) = get_args(public.SnapshotPlace.model_fields["kept"].annotation)
    assert list(get_args(words)) == [one.value for one in model.Kept]


@pytest.mark.parametrize("path", ["/", "/a/../b", "/a/./b//c", "/a/b/../..", "/é\udcff"])
def test_paths_inside(path: str) -> None:
    assert guest_path(path) == path


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/..", PathEscape), ("/a/../../b", PathEscape), ("a", InvalidRequest), ("", InvalidRequest), ("/\0", InvalidRequest)],
)
def test_paths_outside(path: str, kind: type[InvalidRequest]) -> None:
    with pytest.raises(kind):
        guest_path(path)


def test_key_file_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "run" / "api.key"
    key = ensure_key_file(path)
    assert ensure_key_file(path) == key
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(HostUnfit, match="can be read by others"):
        ensure_key_file(path)


def test_key_file_that_a_crash_left_empty_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "api.key"
    path.touch(0o600)
    assert ensure_key_file(path).startswith("pdk_")


def test_a_line_of_a_stream_leaves_out_what_is_unknown_and_is_still_read() -> None:
    """A lost command has no exit code."""
    outcome = public.ExecOutcome(exec_id="exe_1", end=ExecEnd.LOST, exit_code=None)
    event = public.ExecEvent(type="exited", outcome=outcome)
    line = event.model_dump_json(exclude_unset=True, exclude_none=True)
    assert public.ExecEvent.model_validate_json(line).outcome == outcome
