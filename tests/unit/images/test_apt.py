"""The mirror comes from the host's own apt sources, whatever their format, and only Debian's own count."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.core.errors import HostUnfit
from perdure.images import apt


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    (tmp_path / "sources.list.d").mkdir()
    return tmp_path


@pytest.fixture
def keyring(tmp_path: Path) -> Path:
    path = tmp_path / "debian-archive-keyring.gpg"
    path.touch()
    return path


def test_deb822_with_security(etc: Path, keyring: Path) -> None:
    (etc / "sources.list.d" / "debian.sources").write_text(
        "Types: deb\n# a comment\nURIs: http://mirror.test/debian\nSuites: bookworm bookworm-updates\nComponents: main\n"
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n\n"
        "Types: deb\nURIs: http://mirror.test/security\nSuites: bookworm-security\nComponents: main\n"
    )
    assert apt.mirror_lines(etc, keyring) == [
        f"deb [signed-by={keyring}] http://mirror.test/debian trixie main",
        f"deb [signed-by={keyring}] http://mirror.test/security trixie-security main",
        f"deb [signed-by={keyring}] http://mirror.test/debian trixie-updates main",
    ]


def test_one_line_format(etc: Path, keyring: Path) -> None:
    (etc / "sources.list").write_text(
        "# deb http://old.test/ x main\ndeb [arch=amd64] http://mirror.test/debian trixie main contrib\n"
    )
    assert apt.mirror_lines(etc, keyring) == [f"deb [signed-by={keyring}] http://mirror.test/debian trixie main"]


def test_other_vendors_and_disabled_sources_do_not_count(etc: Path, keyring: Path) -> None:
    (etc / "sources.list").write_text(
        "deb [signed-by=/usr/share/keyrings/vendor.gpg] https://vendor.test/apt bookworm main\n"
        "deb https://other.test/linux bookworm stable\n"
        "deb https://third.test/apt sdk-bookworm main\n"
        "deb-src http://mirror.test/debian bookworm main\n"
    )
    (etc / "sources.list.d" / "a.sources").write_text(
        "Types: deb\nURIs: http://off.test/debian\nSuites: bookworm\nComponents: main\nEnabled: no\n"
    )
    with pytest.raises(HostUnfit, match="name no Debian mirror"):
        apt.mirror_lines(etc, keyring)


def test_without_a_keyring_nothing_is_fetched(etc: Path, tmp_path: Path) -> None:
    (etc / "sources.list").write_text("deb http://mirror.test/debian bookworm main\n")
    with pytest.raises(HostUnfit, match="no keyring") as caught:
        apt.mirror_lines(etc, tmp_path / "nowhere.gpg")
    assert "debian-archive-keyring" in caught.value.hint
