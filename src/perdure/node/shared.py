"""Files that many workspaces lie on: those of an image, of its goldens, and private bases. Each is read to its last byte once per
start of the server (ADR 21).

They are gigabytes, for which wakes wait once after a boot of the host: what nobody has read since then is read at once when the
server starts, and before the first start that needs it. After that they are read in the background, slowly, and not while a
workspace is being started; a start itself reads what is small, and what somebody has written to since. What is found damaged is
refused by its name from then on, until the file is another one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event

import structlog

from perdure.core.errors import CorruptData, CorruptSnapshot, NotFound, Unavailable
from perdure.core.files import stored_bytes
from perdure.images.registry import CHECKSUMS, ImageStore, described_files, file_name
from perdure.images.verify import problem_of
from perdure.node.secondhome import STANDSTILL_S, Starts
from perdure.node.sinceboot import SinceBoot
from perdure.snapshots.bases import Abandoned, check_base
from perdure.snapshots.frozen import Identity, ended_by, identity_of, until_enough
from perdure.snapshots.manifest import BaseFact, base_file
from perdure.snapshots.store import SnapshotStore

#: A file with no more than this in it is read before its first use.
SMALL_BYTES = 16 << 20
#: How long after the server's start the background begins: at first everybody wants to wake.
BEGIN_AFTER_S = 30.0
#: Of one processor.
SHARE = 0.1
_LOOK_S = 0.25

_HINT = "Put that file back as it was. If it is an image's, new workspaces can also be made of one that is built again."

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SharedFile:
    """``name`` is what errors call it. ``read`` says what is wrong with it, and nothing if it is whole; who is told of the bytes
    may raise to end it."""

    path: Path
    name: str
    read: Callable[[Callable[[int], None]], str]


@dataclass(frozen=True, slots=True)
class _Seen:
    identity: Identity
    problem: str


class SharedFiles:
    """Those of one node. ``damaged`` hears of each that is."""

    def __init__(self, starts: Starts, damaged: Callable[[SharedFile], Awaitable[None]], since_boot: SinceBoot) -> None:
        self._starts = starts
        self._damaged = damaged
        self._since_boot = since_boot
        self._reading: dict[Path, asyncio.Task[None]] = {}
        self._seen: dict[Path, _Seen] = {}
        self._described: dict[Path, tuple[Identity, dict[Path, SharedFile]]] = {}
        self._waiting: dict[Path, tuple[int, SharedFile]] = {}
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, everything: Callable[[], Iterable[SharedFile]], begin_after_s: float = BEGIN_AFTER_S) -> None:
        """Begin to read, in a while, what there is then."""
        self._task = asyncio.create_task(self._work(everything, begin_after_s), name="shared-files")

    async def close(self) -> None:
        ours = [*(() if self._task is None else (self._task,)), *self._reading.values()]
        for task in ours:
            task.cancel()
        if ours:
            await asyncio.wait(ours)

    # --------------------------------------------------------------------------------------------------------- which files

    def of(self, paths: Iterable[Path]) -> list[SharedFile]:
        """Those of them that an image or a golden beside them describes. Raises CorruptData when the description is damaged."""
        return [found for path in paths if (found := self.beside(path.parent).get(path)) is not None]

    def beside(self, directory: Path) -> dict[Path, SharedFile]:
        """What the description of an image or golden says of the files in its directory; nothing where there is none."""
        for description in (directory / name for name in ("image.json", "golden.json", CHECKSUMS)):
            try:
                identity = identity_of(description)
            except FileNotFoundError:
                continue
            known = self._described.get(description)
            if known is None or known[0] != identity:
                files = {
                    (path := directory / name): SharedFile(path, file_name(path), partial(problem_of, path, facts))
                    for name, facts in described_files(description)["files"].items()
                }
                known = self._described[description] = (identity, files)
            return known[1]
        return {}

    # --------------------------------------------------------------------------------------------------------- for a start

    async def before_start(self, files: Iterable[SharedFile]) -> None:
        """Wait for those that nobody has read since the host was booted. Raises CorruptSnapshot naming the file when one of them
        is known to be damaged, or is found to be."""
        await self.whole([file for file in files if not self._may_be_read_later(file)])

    def _may_be_read_later(self, file: SharedFile) -> bool:
        seen, identity = self._seen.get(file.path), _identity(file)
        if seen is None and stored_bytes(file.path) > SMALL_BYTES and self._since_boot.knows(file.path, identity):
            self._later(file)
            return True
        if seen is None or seen.problem or seen.identity[:-1] != identity[:-1]:
            return False
        if seen.identity != identity:  # linked or the like: nobody has written to it
            self._later(file)
        return True

    async def whole(self, files: Iterable[SharedFile]) -> None:
        """Wait until each has been read as it is now. Raises CorruptSnapshot naming the first that is damaged."""
        wanted = list(files)
        for file in wanted:
            if not self._is_read(file):
                self._begin(file)
        for file in wanted:
            await self._whole(file)

    def soon(self, files: Iterable[SharedFile]) -> None:
        """A start will probably need them."""
        for file in files:
            if self._is_new(file):
                self._begin(file)

    def written(self, file: SharedFile) -> None:
        """This process has just written it, with its checksum: as good as read."""
        self._since_boot.note(file.path, _identity(file))
        self._later(file)

    def _begin(self, file: SharedFile) -> asyncio.Task[None]:
        """Read it for all who want it. Who goes away does not end it."""
        task = self._reading.get(file.path)
        if task is None:
            task = asyncio.create_task(until_enough(lambda enough: self._read(file, ended_by(enough))), name="shared-file")
            self._reading[file.path] = task
            task.add_done_callback(partial(self._ended, file.path))
        return task

    def _ended(self, path: Path, task: asyncio.Task[None]) -> None:
        del self._reading[path]
        if not task.cancelled():
            task.exception()  # who waits for it gets it

    async def _whole(self, file: SharedFile) -> None:
        if not self._is_read(file):
            task = self._begin(file)
            await asyncio.wait([task])
            if task.cancelled():
                raise Unavailable("The server is shutting down.", hint="Try again when it is back; the workspace is safe.")
            task.result()
        if problem := self._seen[file.path].problem:
            await self._damaged(file)
            raise CorruptSnapshot(problem, file=file.name, hint=_HINT)

    def _is_read(self, file: SharedFile) -> bool:
        seen = self._seen.get(file.path)
        return seen is not None and seen.identity == _identity(file)

    def _read(self, file: SharedFile, told: Callable[[int], None]) -> None:
        identity = _identity(file)
        problem = file.read(told)
        if not problem and stored_bytes(file.path) > SMALL_BYTES:
            self._since_boot.note(file.path, identity)
        self._seen[file.path] = _Seen(identity, problem)

    # ------------------------------------------------------------------------------------------------------- the background

    def _later(self, file: SharedFile) -> None:
        self._waiting[file.path] = stored_bytes(file.path), file
        self._more.set()

    async def _work(self, everything: Callable[[], Iterable[SharedFile]], begin_after_s: float) -> None:
        for file in await asyncio.to_thread(lambda: [one for one in everything() if self._is_new(one)]):
            try:
                await self._whole(file)
            except CorruptSnapshot as error:
                log.error("a file that workspaces lie on is damaged", file=file.name, problem=error.message)
        await asyncio.sleep(begin_after_s)
        for file in await asyncio.to_thread(lambda: list(everything())):
            self._later(file)
        while True:
            await self._more.wait()
            self._more.clear()
            while self._waiting:
                await self._one(min(self._waiting, key=lambda path: self._waiting[path][0]))

    def _is_new(self, file: SharedFile) -> bool:
        """Whether a start would wait for it."""
        try:
            return stored_bytes(file.path) > SMALL_BYTES and not self._since_boot.knows(file.path, _identity(file))
        except CorruptSnapshot:
            return False  # it is gone; a start that misses it says so

    async def _one(self, path: Path) -> None:
        _, file = self._waiting.pop(path)
        try:
            if self._is_read(file):
                return
            await until_enough(lambda enough: self._read(file, self._paced(file, enough)))
        except (CorruptSnapshot, Abandoned):
            return  # it is gone, as images go that nobody uses any more, or a start has read it meanwhile
        if problem := self._seen[path].problem:
            log.error("a file that workspaces lie on is damaged", file=file.name, problem=problem)
            await self._damaged(file)

    def _paced(self, file: SharedFile, enough: Event) -> Callable[[int], None]:
        """Takes its share of the time, and stands still while workspaces are being started."""
        ended, since = ended_by(enough), time.perf_counter()

        def told(count: int) -> None:
            nonlocal since
            now = time.perf_counter()
            enough.wait((now - since) * (1 / SHARE - 1))
            while not self._starts.quiet.wait(_LOOK_S) and not enough.is_set() and time.perf_counter() < now + STANDSTILL_S:
                pass
            ended(count)
            if self._is_read(file):
                raise Abandoned
            since = time.perf_counter()

        return told


def private_base(store: SnapshotStore, fact: BaseFact) -> SharedFile:
    def read(told: Callable[[int], None]) -> str:
        try:
            check_base(store.bases, fact, told, content=True)
        except CorruptSnapshot as error:
            return error.message
        return ""

    name = base_file(fact.base_id)
    return SharedFile(store.bases / name, f"bases/{name}", read)


def below(store: SnapshotStore, images: ImageStore, shared: SharedFiles) -> Iterator[SharedFile]:
    """What the snapshots of a node lie on. Descriptions that cannot be read are left to whoever needs them."""
    for facts in store.complete():
        try:
            manifest = store.manifest(facts.snapshot_id)
        except NotFound:
            continue  # deleted meanwhile
        if manifest.private_base is not None:
            yield private_base(store, manifest.private_base)
        for base in (manifest.disk_base, *(() if manifest.memory is None else (manifest.memory.base,))):
            directories = [images.root / "blobs" / base.image]
            directories += [] if base.golden is None else [images.golden_path(base.image, base.golden)]
            for directory in directories:
                try:
                    yield from shared.beside(directory).values()
                except CorruptData as error:
                    log.error("a description of files that workspaces lie on is damaged", file=error.file)


def _identity(file: SharedFile) -> Identity:
    try:
        return identity_of(file.path)
    except FileNotFoundError as error:
        raise CorruptSnapshot(f"The file {file.name} is missing.", file=file.name, hint=_HINT) from error
    except OSError as error:
        raise CorruptSnapshot(f"The file {file.name} cannot be read ({error.strerror}).", file=file.name, hint=_HINT) from error
