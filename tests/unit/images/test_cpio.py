"""The initramfs archive, read back by a reader written from the format's description."""

from __future__ import annotations

import stat

from perdure.images import cpio


def members(data: bytes) -> list[tuple[str, list[int], bytes]]:
    """A reader written from the format's description: (name, the 13 header numbers, content)."""
    found, at = [], 0
    while True:
        assert data[at : at + 6] == b"070701", at
        numbers = [int(data[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        name_end = at + 110 + numbers[11]
        name = data[at + 110 : name_end - 1].decode()
        assert data[name_end - 1] == 0
        start = name_end + -name_end % 4
        content = data[start : start + numbers[6]]
        at = start + numbers[6] + -(start + numbers[6]) % 4
        if name == "TRAILER!!!":
            return found
        found.append((name, numbers, content))


def test_what_is_written_is_read_back() -> None:
    entries = [
        cpio.directory("bin"),
        cpio.file("bin/odd", b"12345", 0o755),
        cpio.file("empty", b""),
        cpio.character_device("dev/console", 5, 1),
    ]
    read = members(cpio.archive(entries))
    assert [name for name, _, _ in read] == ["bin", "bin/odd", "empty", "dev/console"]
    assert [content for _, _, content in read] == [b"", b"12345", b"", b""]
    modes = [numbers[1] for _, numbers, _ in read]
    assert [stat.S_IFMT(mode) for mode in modes] == [stat.S_IFDIR, stat.S_IFREG, stat.S_IFREG, stat.S_IFCHR]
    assert stat.S_IMODE(modes[1]) == 0o755
    assert read[3][1][9:11] == [5, 1]


def test_owner_and_time_are_root_and_nought_so_that_equal_input_gives_equal_bytes() -> None:
    entries = [cpio.file("x", b"x")]
    assert cpio.archive(entries) == cpio.archive(entries)
    (_, numbers, _), *_ = members(cpio.archive(entries))
    assert numbers[2:4] == [0, 0]
    assert numbers[5] == 0


def test_the_archive_is_padded_for_the_kernel() -> None:
    assert len(cpio.archive([cpio.file("x", b"abc")])) % 512 == 0
