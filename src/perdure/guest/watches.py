"""Watches: what changes below a directory, told by inotify(7), kept for a while for readers that come back.

A watch is the guest's own, like a command: it sleeps and wakes with the memory, and a reader that was cut off names it and the
last event it has seen. The kernel's events are read by the agent's thread; directories are added by hands, since that touches
the disk. While one does, nothing is read, so that no event is of a directory that nobody knows yet.
"""

from __future__ import annotations

import errno
import json
import os
import struct
from collections import deque

from perdure.guest import linux, within
from perdure.guest.hands import Tag
from perdure.guest.loop import READ
from perdure.guest.worker import Refusal
from perdure.wire.guest.ops import HIDDEN, WATCH_BYTES, WATCH_KEPT_S, WATCHES_MAX, Code, Op

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from perdure.guest.files import FileTable
    from perdure.guest.hands import Talk
    from perdure.guest.loop import Loop, Timer
    from perdure.wire.guest.mux import Mux

_MODIFY, _ATTRIB, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x4, 0x40, 0x80, 0x100, 0x200
_DELETE_SELF, _MOVE_SELF, _UNMOUNT, _OVERFLOW, _IGNORED = 0x400, 0x800, 0x2000, 0x4000, 0x8000
_ONLYDIR, _DONT_FOLLOW, _EXCL_UNLINK, _ISDIR = 0x0100_0000, 0x0200_0000, 0x0400_0000, 0x4000_0000
_MASK = _MODIFY | _ATTRIB | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF | _MOVE_SELF | _ONLYDIR | _EXCL_UNLINK
_EVENT = struct.Struct("iIII")
_READ_BYTES = 64 * 1024
#: How long the other half of a rename may take to be read.
_PAIR_S = 0.05


class Watch:
    """One watch. ``lines`` are its last events as JSON, of ``told`` in all; some reader was sent ``seen``."""

    def __init__(self, owner: Watches, request: dict[str, Any]) -> None:
        self.id = f"wch_{os.urandom(10).hex()}"
        self.shown = request["path"].rstrip("/") or "/"
        self.root = request.get("root")
        self.recursive = bool(request.get("recursive"))
        self.top = ""  # the directory itself, once a hand has found it
        self.names: dict[int, str] = {}  # watched directories, below the top ("" is the top)
        self.lines: deque[bytes] = deque()
        self.told = self.seen = 0
        self.over = False
        self.readers: set[Reader] = set()
        self._owner = owner
        self._bytes = 0
        self._moved: dict[int, tuple[str, bool]] = {}  # by cookie: the first halves of renames
        self._pair_timer: Timer | None = None
        self._kept: Timer | None = None
        self._adding = False
        self.fd = linux.watch_files()

    # ------------------------------------------------------------------------------------------------------ directories

    def add(self, directories: list[tuple[str, bool]], first: Reader | None = None) -> None:
        """Have a hand watch directories (names below the top; whether all that is in them is news). ``first`` is who opens it."""
        hands = self._owner.hands
        hand = hands.take()
        self._adding = True
        self._owner.loop.remove(self.fd)

        def answered(tag: str, value: Any) -> None:
            hands.give(hand)
            self._adding = False
            if self.over:
                self.close()
                return
            if tag == Tag.REFUSED:
                self._refused(value, first)
                return
            for name, is_directory in value:
                self.tell("created", name, is_directory)
            self._owner.loop.add(self.fd, READ, self._on_ready)
            if first is not None:
                first.opened()

        hand.ask({"op": Op.WATCH, "path": self.shown, "watch": self, "root": self.root, "directories": directories}, answered)

    def _refused(self, why: tuple[str, str], first: Reader | None) -> None:
        if first is not None:
            first.refused(*why)
        else:
            self.tell("overflow", "", True)
            self._owner.loop.add(self.fd, READ, self._on_ready)

    # ----------------------------------------------------------------------------------------------------------- events

    def _on_ready(self, _mask: int) -> None:
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return
        added: list[tuple[str, bool]] = []
        position = 0
        while position < len(data):
            number, mask, cookie, length = _EVENT.unpack_from(data, position)
            position += _EVENT.size
            name = os.fsdecode(data[position : position + length].rstrip(b"\0"))
            position += length
            self._on_event(number, mask, cookie, name, added)
        if self._moved and self._pair_timer is None:
            self._pair_timer = self._owner.loop.call_later(_PAIR_S, self._on_unpaired)
        if added and not self.over:
            try:
                self.add(added)
            except Refusal:  # too much is under way
                self.tell("overflow", "", True)

    def _on_event(self, number: int, mask: int, cookie: int, name: str, added: list[tuple[str, bool]]) -> None:
        if mask & _OVERFLOW:
            self.tell("overflow", "", True)
            return
        if self._moved and not (mask & _MOVED_TO and cookie in self._moved):
            self._on_unpaired()  # the halves of a rename follow each other
        directory = self.names.get(number)
        if mask & _IGNORED:
            self.names.pop(number, None)
        if directory is None:
            return
        if mask & (_DELETE_SELF | _MOVE_SELF | _UNMOUNT):
            if not directory:
                self._end("the directory is gone")
            return
        if mask & _IGNORED or not name:
            return
        path, is_directory = f"{directory}/{name}" if directory else name, bool(mask & _ISDIR)
        self._on_change(path, is_directory, mask, cookie, added)

    def _on_change(self, path: str, is_directory: bool, mask: int, cookie: int, added: list[tuple[str, bool]]) -> None:
        if mask & _MOVED_FROM:
            self._moved[cookie] = (path, is_directory)
        elif mask & _MOVED_TO:
            self._on_moved(path, is_directory, self._moved.pop(cookie, None), added)
        elif not _is_hidden(path.rpartition("/")[2], mask):
            if mask & _CREATE and is_directory and self.recursive:
                added.append((path, True))
            kind = "created" if mask & _CREATE else "removed" if mask & _DELETE else "written" if mask & _MODIFY else "attributes"
            self.tell(kind, path, is_directory)

    def _on_moved(self, path: str, is_directory: bool, half: tuple[str, bool] | None, added: list[tuple[str, bool]]) -> None:
        if path.rpartition("/")[2].startswith(HIDDEN):
            return
        old = half[0] if half is not None else None
        if old is not None and old.rpartition("/")[2].startswith(HIDDEN):
            self.tell("written", path, is_directory)  # it was written under a hidden name
            return
        if is_directory and self.recursive:
            added.append((path, half is None))
        self.tell("created" if old is None else "renamed", path, is_directory, old)

    def _on_unpaired(self) -> None:
        """Renames whose other half has not come went out of what is watched."""
        if self._pair_timer is not None:
            self._pair_timer.cancel()
            self._pair_timer = None
        moved, self._moved = self._moved, {}
        for path, is_directory in moved.values():
            if path.rpartition("/")[2].startswith(HIDDEN):
                continue
            self.tell("removed", path, is_directory)
            for number, name in list(self.names.items()):
                if name == path or name.startswith(f"{path}/"):
                    del self.names[number]
                    linux.unwatch_directory(self.fd, number)

    def _end(self, why: str) -> None:
        self.tell("ended", "", True, reason=why)
        self.stop()
        for reader in list(self.readers):
            reader.on_room()

    def tell(self, kind: str, name: str, is_directory: bool, old: str | None = None, *, reason: str = "") -> None:
        event = {"seq": self.told + 1, "kind": kind, "path": self._path(name), "directory": is_directory}
        if old is not None:
            event["old_path"] = self._path(old)
        if reason:
            event["reason"] = reason
        line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
        if self.lines and self.seen < self.told and _same(self.lines[-1], line):
            return  # a file that is written and written, and nobody has been told of the last time yet
        self.told += 1
        self.lines.append(line)
        self._bytes += len(line)
        while self._bytes > WATCH_BYTES and len(self.lines) > 1:
            self._bytes -= len(self.lines.popleft())
        for reader in list(self.readers):
            reader.on_room()

    def _path(self, name: str) -> str:
        return os.path.join(self.shown, name) if name else self.shown

    # ---------------------------------------------------------------------------------------------------------- readers

    def attach(self, reader: Reader) -> None:
        self.readers.add(reader)
        if self._kept is not None:
            self._kept.cancel()
            self._kept = None

    def detach(self, reader: Reader) -> None:
        self.readers.discard(reader)
        if not self.readers and self._kept is None:
            self._kept = self._owner.loop.call_later(WATCH_KEPT_S, self._forget)

    def _forget(self) -> None:
        self._owner.watches.pop(self.id, None)
        self.stop()

    def stop(self) -> None:
        """Watch no more, as soon as no hand works on it; what was told can still be read."""
        self.over = True
        if not self._adding:
            self.close()

    def close(self) -> None:
        if self.fd >= 0:
            self._owner.loop.remove(self.fd)
            os.close(self.fd)
            self.fd = -1
        self.names.clear()


def _is_hidden(name: str, mask: int) -> bool:
    """Whether a name is of a file that is being written: ours, or one without any (O_TMPFILE), which the kernel calls so."""
    return name.startswith(HIDDEN) or (bool(mask & _ATTRIB) and name[:1] == "#" and name[1:].isdecimal())


def _same(one: bytes, other: bytes) -> bool:
    """Whether two lines say the same but for their number."""
    return one.partition(b",")[2] == other.partition(b",")[2]


class Reader:
    """A stream that reads a watch: a job of ``files.FileTable``."""

    def __init__(self, table: FileTable, stream: int, request: dict[str, Any]) -> None:
        self._table = table
        self._mux: Mux = table.mux
        self._stream = stream
        self._watches = table.watches()
        self._open = False
        self.over = False
        self.position = 0  # the number of the last event that was sent
        known = request.get("watch")
        if known is None:
            self._watch = self._watches.make(request)
            self._watch.attach(self)
            try:
                self._watch.add([("", False)], self)
            except Refusal:
                self._watches.drop(self._watch)
                raise
        else:
            self._watch = self._watches.find(known)
            self.position = min(max(0, int(request.get("after") or 0)), self._watch.told)
            self._watch.attach(self)
            self.opened()

    def opened(self) -> None:
        if self not in self._watch.readers:
            return  # cut off meanwhile
        self._open = True
        self._mux.accept(self._stream, {"watch": self._watch.id})
        self.on_room()

    def refused(self, code: str, message: str) -> None:
        self._watches.drop(self._watch)
        self._table.jobs.pop(self._stream, None)
        self._mux.reset(self._stream, code, message)

    def on_room(self) -> None:
        """Send what it has not seen, as far as there is room."""
        watch, mux = self._watch, self._mux
        if not self._open:
            return
        first = watch.told - len(watch.lines) + 1
        if self.position + 1 < first:
            line = json.dumps({"seq": first - 1, "kind": "overflow", "path": watch.shown, "directory": True}).encode() + b"\n"
            if mux.room(self._stream) < len(line):
                return
            self.position = first - 1
            mux.send(self._stream, line)
        while self.position < watch.told:
            line = watch.lines[self.position - first + 1]
            if mux.room(self._stream) < len(line):
                return
            self.position += 1
            watch.seen = max(watch.seen, self.position)
            mux.send(self._stream, line)
        if watch.over:
            self._open, self.over = False, True
            self._table.jobs.pop(self._stream, None)
            watch.detach(self)
            mux.eof(self._stream)

    def on_data(self, data: bytes | memoryview) -> None:
        self._mux.consumed(self._stream, len(data))

    def on_message(self, message: dict[str, Any]) -> None:
        """A reader says nothing."""

    def abort(self) -> None:
        """Cut off; the watch goes on."""
        self._open = False
        self._watch.detach(self)


class Watches:
    """All watches of this workspace."""

    def __init__(self, table: FileTable, loop: Loop) -> None:
        self.loop = loop
        self.hands = table.hands
        self.watches: dict[str, Watch] = {}

    def make(self, request: dict[str, Any]) -> Watch:
        for name, watch in list(self.watches.items()):
            if len(self.watches) >= WATCHES_MAX and not watch.readers:  # the oldest that nobody reads
                self.watches.pop(name)
                watch.stop()
        if len(self.watches) >= WATCHES_MAX:
            raise Refusal(Code.BUSY, f"{WATCHES_MAX} watches are open in the workspace; close one of them.")
        watch = Watch(self, request)
        self.watches[watch.id] = watch
        return watch

    def drop(self, watch: Watch) -> None:
        self.watches.pop(watch.id, None)
        watch.stop()

    def find(self, name: Any) -> Watch:
        watch = self.watches.get(name) if isinstance(name, str) else None
        if watch is None:
            raise Refusal(Code.NOT_FOUND, f"There is no watch {str(name)[:80]}: memory was not kept, or nobody read it for long.")
        return watch


# ----------------------------------------------------------------------------------------------------------------- in a hand


def add_directories(talk: Talk, request: dict[str, Any]) -> None:
    watch: Watch = request["watch"]
    found: dict[str, bool] = {}
    if not watch.top:
        path = request["path"]
        if request.get("root") is not None:
            os.chdir(within.enter(request["root"], path, follow=True))
        else:
            os.chdir(path)
        watch.top = os.getcwd()  # where it really is, whatever links led here
        os.chdir("/")
    for name, is_news in request["directories"]:
        _add_below(watch, name, is_news, found)
    talk.say(Tag.OVER, list(found.items()))


def _add_below(watch: Watch, name: str, is_news: bool, found: dict[str, bool]) -> None:
    """What is there when a watch begins is nobody's news. Of a directory that was renamed it is what lies in directories that
    were not watched under the old name, because the rename overtook the hand that came for them."""
    is_first, waiting = not name, [name]
    while waiting:
        name = waiting.pop()
        path = os.path.join(watch.top, name) if name else watch.top
        try:
            number = linux.watch_directory(watch.fd, path, _MASK | _DONT_FOLLOW)
            is_new = is_news or (not is_first and number not in watch.names)
            watch.names[number] = name
            entries = list(os.scandir(path)) if watch.recursive else []
        except OSError as error:
            if error.errno == errno.ENOSPC:
                most = "There are more directories below it than this workspace can watch (fs.inotify.max_user_watches)."
                raise Refusal(Code.CONFLICT, most) from error
            if not name:
                raise
            continue  # gone again, or no directory any more
        for entry in entries:
            below = f"{name}/{entry.name}" if name else entry.name
            is_directory = entry.is_dir(follow_symlinks=False)
            if is_new:
                found[below] = is_directory
            if is_directory:
                waiting.append(below)
