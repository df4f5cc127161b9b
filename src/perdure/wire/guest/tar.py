"""tar, as far as directories of a workspace need it: written as POSIX pax, read as pax, ustar and GNU. Pure; no I/O.

Python's own ``tarfile`` keeps every member it has seen, takes megabytes of each sleeping guest once it is imported, and pulls
from a blocking file. This one holds one header at a time and is fed, so both ends of a stream use it, threads and event loops
alike. (Formats: POSIX.1-2017 pax, "ustar Interchange Format"; GNU tar's manual, "Basic Tar Format".)

Names are bytes; as text they are decoded with ``surrogateescape``.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 512
#: What ends an archive.
END = bytes(2 * BLOCK)
#: Longest record of a pax header, or long name, that a reader takes.
_META_MAX = 1 << 20
_HEADER = struct.Struct("100s8s8s8s12s12s8sc100s6s2s32s32s8s8s155s12x")
_OCTAL_7 = 0o7777777
_OCTAL_11 = 0o77777777777


class Kind:
    """Type flags."""

    FILE = "0"
    HARD_LINK = "1"
    SYMLINK = "2"
    CHARACTER_DEVICE = "3"
    BLOCK_DEVICE = "4"
    DIRECTORY = "5"
    PIPE = "6"


_DEVICES = (Kind.CHARACTER_DEVICE, Kind.BLOCK_DEVICE, Kind.PIPE)
_ORDINARY = (Kind.FILE, Kind.HARD_LINK, Kind.SYMLINK, Kind.DIRECTORY, *_DEVICES)


class BadArchive(ValueError):
    """What was read is no archive, or one that nobody here reads; the text is one sentence."""


class Entry:
    """One member. ``size`` is that of its data, which only files have."""

    __slots__ = ("kind", "mode", "mtime_ns", "path", "size", "target")

    def __init__(self, path: str, kind: str, *, size: int = 0, mode: int = 0o644, mtime_ns: int = 0, target: str = "") -> None:
        self.path = path
        self.kind = kind
        self.size = size
        self.mode = mode
        self.mtime_ns = mtime_ns
        self.target = target


def parts_of(path: str) -> list[str]:
    """A member's path as names. Raises BadArchive for one that leads, or could lead, out of where it is unpacked."""
    if path.startswith("/"):
        raise BadArchive(f"{path!r} is an absolute path.")
    names = [name for name in path.split("/") if name not in ("", ".")]
    if ".." in names:
        raise BadArchive(f"{path!r} contains '..'.")
    if "\0" in path or any(len(_raw(name)) > 255 for name in names):
        raise BadArchive(f"{path[:300]!r} is not a path.")
    return names


def leads_out(target: str, depth: int) -> bool:
    """Whether a link, ``depth`` directories below the top of a tree, could lead out of it.

    One that climbs only at its beginning, and not above the top, cannot: the directories that it climbs are real ones.
    """
    if target.startswith("/"):
        return True
    names = [name for name in target.split("/") if name not in ("", ".")]
    climbs = 0
    while climbs < len(names) and names[climbs] == "..":
        climbs += 1
    return climbs > depth or ".." in names[climbs:]


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


# ------------------------------------------------------------------------------------------------------------------ writing


def header(entry: Entry) -> bytes:
    """The blocks before a member's data, a pax header included where the plain one has no room."""
    name, target, records = _raw(entry.path), _raw(entry.target), []
    seconds, rest_ns = divmod(entry.mtime_ns, 10**9)
    if len(name) > 100:
        records.append((b"path", name))
    if len(target) > 100:
        records.append((b"linkpath", target))
    if entry.size > _OCTAL_11:
        records.append((b"size", b"%d" % entry.size))
    if rest_ns or not 0 <= seconds <= _OCTAL_11:
        sign, whole_ns = (b"-", -entry.mtime_ns) if entry.mtime_ns < 0 else (b"", entry.mtime_ns)
        records.append((b"mtime", b"%b%d.%09d" % (sign, *divmod(whole_ns, 10**9))))
    if any(not _is_utf8(value) for _, value in records):
        records.insert(0, (b"hdrcharset", b"BINARY"))
    size = entry.size if entry.size <= _OCTAL_11 else 0
    moment = seconds if 0 <= seconds <= _OCTAL_11 else 0
    plain = _block(name[:100], entry.kind, size, mode=entry.mode, mtime=moment, target=target[:100])
    return _extended("x", records) + plain if records else plain


def comment(text: str) -> bytes:
    """A remark among the members; whoever does not know what it means ignores it."""
    return _extended("g", [(b"comment", text.encode("utf-8", "backslashreplace"))])


def padding(size: int) -> bytes:
    """What follows data of so many bytes."""
    return bytes(-size % BLOCK)


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _extended(kind: str, records: list[tuple[bytes, bytes]]) -> bytes:
    body = b"".join(_record(name, value) for name, value in records)
    return _block(b"pax_header", kind, len(body)) + body + padding(len(body))


def _record(name: bytes, value: bytes) -> bytes:
    rest = b" %b=%b\n" % (name, value)
    length = len(rest) + len(str(len(rest)))
    if len(str(length)) > len(str(len(rest))):
        length += 1
    return b"%d%b" % (length, rest)


def _block(name: bytes, kind: str, size: int, *, mode: int = 0o644, mtime: int = 0, target: bytes = b"") -> bytes:
    fields = [
        name,
        b"%07o\0" % (mode & 0o7777),
        b"0000000\0",
        b"0000000\0",
        b"%011o\0" % size,
        b"%011o\0" % mtime,
        b" " * 8,
        kind.encode(),
        target,
        b"ustar\0",
        b"00",
        *(b"",) * 5,
    ]
    total = sum(_HEADER.pack(*fields))
    fields[6] = b"%06o\0 " % total
    return _HEADER.pack(*fields)


# ------------------------------------------------------------------------------------------------------------------ reading


class Reader:
    """Bytes in, members out, whatever the cuts.

    ``feed`` yields an ``Entry``; of a file then the pieces of its data, and None when it is complete. Raises BadArchive; nothing
    may be fed after that.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()  # a header that is not complete, or the body of a member about the next one
        self._wanted = BLOCK
        self._data = 0  # bytes of the current file still to come
        self._padding = 0
        self._about = ""  # the kind of the member whose body is collected
        self._about_size = 0
        self._told: dict[str, bytes] = {}  # what such members say of the next one
        self._zeros = 0
        self.ended = False
        self.comments: list[str] = []

    def feed(self, data: bytes | memoryview) -> Iterator[Entry | bytes | None]:
        view = memoryview(data)
        while view and not self.ended:
            if self._data:
                piece, view = view[: self._data], view[self._data :]
                self._data -= len(piece)
                yield bytes(piece)
                if not self._data:
                    yield None
                continue
            if self._padding:
                count = min(len(view), self._padding)
                self._padding -= count
                view = view[count:]
                continue
            count = min(len(view), self._wanted - len(self._buffer))
            self._buffer += view[:count]
            view = view[count:]
            if len(self._buffer) == self._wanted:
                block = bytes(self._buffer)
                self._buffer.clear()
                yield from self._on_block(block)

    def finish(self) -> None:
        """Nothing more comes. Raises BadArchive unless the archive said so, too."""
        if not self.ended:
            raise BadArchive("The archive ends in the middle.")

    def _on_block(self, block: bytes) -> Iterator[Entry | None]:
        if self._about:
            self._on_about(block[: self._about_size])
            self._about, self._wanted = "", BLOCK
            return
        if not any(block):
            self._zeros += 1
            self.ended = self._zeros == 2
            return
        self._zeros = 0
        fields = _HEADER.unpack(block)
        if sum(block) - sum(block[148:156]) + 8 * 32 != _number(fields[6]):
            raise BadArchive("A header's checksum is wrong: this is no tar archive, or it is damaged.")
        kind = {"\0": Kind.FILE, "7": Kind.FILE}.get(fields[7].decode("latin-1"), fields[7].decode("latin-1"))
        size = _number(fields[4])
        if kind in ("x", "g", "L", "K"):
            if size > _META_MAX:
                raise BadArchive("A header of the archive is longer than 1 MiB.")
            self._about, self._about_size = kind, size
            self._wanted = size + -size % BLOCK or BLOCK
            if not size:
                self._about = ""
            return
        entry = self._entry(fields, kind, size)
        yield entry
        if entry.kind == Kind.FILE:
            self._data, self._padding = entry.size, -entry.size % BLOCK
            if not entry.size:
                yield None

    def _entry(self, fields: tuple[bytes, ...], kind: str, size: int) -> Entry:
        told, self._told = self._told, {}
        if kind not in _ORDINARY or any(key.startswith("GNU.sparse") for key in told):
            raise BadArchive(f"The archive has a member of a kind ({kind!r}) that is not unpacked here, such as a sparse file.")
        name = told.get("path")
        if name is None:
            name = _text(fields[0])
            if fields[9] == b"ustar\0" and _text(fields[15]):
                name = _text(fields[15]) + b"/" + name
        if kind == Kind.FILE and name.endswith(b"/"):  # before there was ustar
            kind = Kind.DIRECTORY
        target = told.get("linkpath", _text(fields[8]))
        size = int(told["size"]) if told.get("size", b"").isdigit() else size
        moment = _moment_ns(told["mtime"]) if "mtime" in told else _number(fields[5]) * 10**9
        return Entry(
            name.decode("utf-8", "surrogateescape"),
            kind,
            size=size if kind == Kind.FILE else 0,
            mode=_number(fields[1]) & 0o7777,
            mtime_ns=moment,
            target=target.decode("utf-8", "surrogateescape"),
        )

    def _on_about(self, body: bytes) -> None:
        if self._about in ("L", "K"):
            self._told["path" if self._about == "L" else "linkpath"] = _text(body)
            return
        records = _records(body)
        if self._about == "g":
            self.comments += [records["comment"].decode("utf-8", "replace")] if "comment" in records else []
        else:
            self._told |= records


def _text(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU: base 256
        value = int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
        return value - (1 << (8 * len(field) - 1)) if field[0] & 0x40 else value
    digits = field.strip(b" \0")
    try:
        return int(digits or b"0", 8)
    except ValueError:
        raise BadArchive("A number in a header is none: this is no tar archive, or it is damaged.") from None


def _moment_ns(text: bytes) -> int:
    """Decimal seconds, exactly."""
    whole, _, rest = text.decode("ascii", "replace").partition(".")
    try:
        ns = abs(int(whole)) * 10**9 + int((rest + "0" * 9)[:9] or "0")
    except ValueError:
        raise BadArchive("A time in a header is none.") from None
    return -ns if whole.startswith("-") else ns


def _records(body: bytes) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    while body:
        length, space, _ = body.partition(b" ")
        if not space or not length.isdigit() or not len(length) + 3 <= int(length) <= len(body):
            raise BadArchive("An extended header cannot be read.")
        record, body = body[len(length) + 1 : int(length)], body[int(length) :]
        name, equals, value = record.partition(b"=")
        if not equals or not value.endswith(b"\n"):
            raise BadArchive("An extended header cannot be read.")
        found[name.decode("utf-8", "replace")] = value[:-1]
    return found
