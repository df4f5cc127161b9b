"""The master key's file, and HKDF by the RFC's own examples."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.core.errors import CorruptData, HostUnfit
from perdure.core.keys import derive, hkdf, master_key
from perdure.snapshots.objects.keys import TenantKeyring
from perdure.wire.objects import Scope


def test_the_key_is_made_once_and_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "home" / "master.key"
    key = master_key(path)
    assert len(key) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert master_key(path) == key
    assert master_key(tmp_path / "other.key") != key


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "master.key"
    master_key(path)
    path.chmod(0o640)
    with pytest.raises(HostUnfit, match="can be read by others") as caught:
        master_key(path)
    assert "chmod 600" in caught.value.hint


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_a_file_that_is_no_key_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "master.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(CorruptData, match=f"has {len(content)} bytes"):
        master_key(path)
    assert path.read_bytes() == content


def test_no_new_key_is_made_while_tenants_keys_wait_for_the_old_one(tmp_path: Path) -> None:
    path, wrapped = tmp_path / "master.key", tmp_path / "keys"
    wrapped.mkdir()
    tenant = Scope("ten_a")
    made = TenantKeyring(wrapped, master_key(path, wrapped)).of(tenant)
    path.rename(tmp_path / "aside")
    with pytest.raises(CorruptData, match=r"is missing, and .* has keys of tenants that only it can unwrap") as caught:
        master_key(path, wrapped)
    assert "from a backup" in caught.value.hint
    assert not path.exists()
    (tmp_path / "aside").rename(path)
    with_mark = tmp_path / "marks"
    TenantKeyring(with_mark, b"m" * 32).shred(tenant)
    assert len(master_key(tmp_path / "new.key", with_mark)) == 32, "nothing waits for a key there"
    assert TenantKeyring(wrapped, master_key(path, wrapped)).of(tenant) == made


def test_a_key_that_is_none_is_not_said_to_be_worth_nothing(tmp_path: Path) -> None:
    path = tmp_path / "master.key"
    path.write_bytes(b"short")
    path.chmod(0o600)
    with pytest.raises(CorruptData) as caught:
        master_key(path)
    assert "remove it" not in caught.value.hint and "sealed" in caught.value.hint


def test_each_purpose_has_a_key_of_its_own() -> None:
    assert derive(b"m" * 32, "a") == derive(b"m" * 32, "a")
    assert len({derive(b"m" * 32, "a"), derive(b"m" * 32, "b"), derive(b"n" * 32, "a")}) == 3
    assert len(derive(b"m" * 32, "a", length=100)) == 100


@pytest.mark.parametrize(
    ("secret", "salt", "info", "expected"),
    [
        (  # RFC 5869 A.1
            "0b" * 22,
            "000102030405060708090a0b0c",
            "f0f1f2f3f4f5f6f7f8f9",
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (  # A.3: no salt, no info
            "0b" * 22,
            "",
            "",
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
)
def test_hkdf_agrees_with_the_rfc(secret: str, salt: str, info: str, expected: str) -> None:
    found = hkdf(bytes.fromhex(secret), bytes.fromhex(salt), bytes.fromhex(info), len(expected) // 2)
    assert found.hex() == expected
