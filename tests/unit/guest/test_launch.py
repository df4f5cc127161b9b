"""Who a command runs as."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.guest.launch import CannotStart, find_account

PASSWD = "root:x:0:0:root:/root:/bin/bash\n\nbroken\nada:x:1001:1002:Ada:/home/ada:/bin/zsh\n"
GROUP = "root:x:0:\nwheel:x:10:ada,bob\nada:x:1002:ada\n"


@pytest.fixture
def etc(tmp_path: Path) -> str:
    (tmp_path / "passwd").write_text(PASSWD)
    (tmp_path / "group").write_text(GROUP)
    return str(tmp_path)


def test_nobody_named_means_root(etc: str) -> None:
    account = find_account(None, etc)
    assert (account.uid, account.gid, account.home, account.shell) == (0, 0, "/root", "/bin/bash")


@pytest.mark.parametrize("user", ["ada", "1001"])
def test_a_name_or_its_number_gets_home_shell_and_groups(etc: str, user: str) -> None:
    account = find_account(user, etc)
    assert (account.name, account.uid, account.gid, account.home, account.shell) == ("ada", 1001, 1002, "/home/ada", "/bin/zsh")
    assert account.groups == [1002, 10]


def test_numbers_need_no_account(etc: str) -> None:
    account = find_account("5000:6000", etc)
    assert (account.uid, account.gid, account.groups, account.home) == (5000, 6000, [6000], "/")


def test_root_without_any_passwd(tmp_path: Path) -> None:
    assert find_account(None, str(tmp_path)).home == "/root"


@pytest.mark.parametrize("user", ["eve", "ada:wheel", "-1", ""])
def test_an_unknown_user_is_refused_with_a_sentence(etc: str, user: str) -> None:
    with pytest.raises(CannotStart, match="user"):
        find_account(user, etc)
