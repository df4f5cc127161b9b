"""Access to an object store through obstore: S3, Google Cloud Storage, Azure, a local directory, memory.

What is asked of a store is little: a PUT that shows the whole object or none, a GET of a range, a listing, DELETE. No conditional
request is sent and no answer's order is relied on. Failures that a repetition may mend are ``Unavailable`` (``ambiguous`` for a
PUT or a DELETE: it may have been done, or be done later); an object that is not there is ``NotFound``. obstore repeats 5xx
answers and broken connections itself, for as long as the settings say.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, MemoryStore, ObjectStore, from_url

from perdure.core import files
from perdure.core.errors import InvalidRequest, NoSpace, NotFound, Unavailable
from perdure.core.files import DISK, Disk

SCHEMES = ("file", "s3", "gs", "az", "memory")
RETRY_S = 60.0
ATTEMPT_S = 60.0
RETRIES = 8
_LISTED_AT_ONCE = 1000
_DIRECTORY_MODE = 0o700
_OBJECT_MODE = 0o600
#: What a PUT writes to before it renames: ours, and obstore's own, which earlier releases used and no listing of it shows.
_LEFT_OVER = re.compile(rf"^{re.escape(files.TEMPORARY)}|#[0-9]+$")
_FULL_WORDS = ("No space left on device", "Disk quota exceeded")


class Objects(Protocol):
    """Objects by name. A name is made of parts joined by ``/``."""

    async def put(self, name: str, data: bytes) -> None:
        """Durable when it returns. Raises Unavailable (ambiguous) or NoSpace."""
        ...

    async def read(self, name: str, start: int, length: int) -> bytes:
        """Exactly these bytes. Raises NotFound, also when the object ends before, or Unavailable."""
        ...

    async def get(self, name: str) -> bytes:
        """All of it."""
        ...

    async def size(self, name: str) -> int | None:
        """Bytes; None when there is no such object."""
        ...

    def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        """Names below a prefix, which ends at a ``/``, and their sizes."""
        ...

    async def delete(self, names: Sequence[str]) -> None:
        """Those that are not there are fine."""
        ...

    async def sweep(self, before_ms: int) -> int:
        """Remove what no listing shows: what is left of a PUT whose process died, begun before then. Returns how many."""
        ...

    async def settle(self, name: str) -> None:
        """Make an object that is there durable: whoever put it may have died before it was. Raises NotFound or Unavailable."""
        ...


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """``options`` go to obstore as they are, such as ``endpoint`` or ``region`` for S3. Times in seconds."""

    options: dict[str, Any]
    attempt_s: float = ATTEMPT_S
    retry_s: float = RETRY_S
    retries: int = RETRIES


def open_objects(url: str, settings: ClientSettings | None = None) -> ObstoreObjects:
    """The store behind ``file:///directory``, ``s3://bucket/prefix``, ``gs://…``, ``az://…`` or ``memory:///``.

    Credentials come from where the provider's own tools look, or from the options. Raises InvalidRequest for a URL that is none.
    """
    settings = settings or ClientSettings({})
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise InvalidRequest(
            f"{url!r} is no object store.", hint="Use file:///directory, s3://bucket, gs://bucket or az://container."
        )
    if parts.scheme == "memory":
        return ObstoreObjects(MemoryStore(), url)
    if parts.query or parts.fragment or parts.password or (parts.scheme == "file" and parts.netloc not in ("", "localhost")):
        raise InvalidRequest(
            f"The store's URL {parts.scheme}://… holds more than a place.", hint="Give credentials and options apart from it."
        )
    if parts.scheme == "file":
        if not parts.path.strip("/"):
            raise InvalidRequest("The store's URL names no directory.", hint="Use file:///directory.")
        directory = Path(unquote(parts.path))
        try:
            return DirectoryObjects(directory, url)
        except (BaseError, OSError, ValueError) as error:
            raise InvalidRequest(f"The directory {directory} cannot hold a store: {error}.") from error
    if not parts.netloc:
        raise InvalidRequest(f"The store's URL {url!r} names no bucket.", hint=f"Use {parts.scheme}://BUCKET/PREFIX.")
    try:
        return ObstoreObjects(_remote(url, settings), url)
    except (BaseError, ValueError, TypeError) as error:
        raise InvalidRequest(
            f"The store {url} cannot be set up: {error}.", hint="Look at the URL and at the options for it."
        ) from error


def _remote(url: str, settings: ClientSettings) -> ObjectStore:
    options = dict(settings.options)
    client = {"timeout": timedelta(seconds=settings.attempt_s), **options.pop("client_options", {})}
    retry = {"max_retries": settings.retries, "retry_timeout": timedelta(seconds=settings.retry_s)}
    store: ObjectStore = from_url(url, client_options=client, retry_config=retry, **options)  # type: ignore[call-overload]
    return store


class ObstoreObjects:
    """Implements Objects on whatever obstore can speak to."""

    def __init__(self, store: ObjectStore, url: str) -> None:
        self._store = store
        self.url = url

    async def put(self, name: str, data: bytes) -> None:
        with _explained(self.url, name, writes=True):
            # One request: a multipart upload that dies would leave parts that no listing shows.
            await obstore.put_async(self._store, name, data, use_multipart=False)

    async def read(self, name: str, start: int, length: int) -> bytes:
        if length == 0:
            return b""
        try:
            with _explained(self.url, name):
                data = bytes(await obstore.get_range_async(self._store, name, start=start, length=length))
            return _whole(name, data, length)
        except Unavailable as error:
            # Stores tell in different ways that an object ends before: by an error, or by less. That will not pass.
            size = await self.size(name)
            if size is not None and size < start + length:
                raise NotFound(f"The object store's {name} ends after {size} bytes.") from error
            raise

    async def get(self, name: str) -> bytes:
        with _explained(self.url, name):
            result = await obstore.get_async(self._store, name)
            return _whole(name, bytes(await result.bytes_async()), int(result.meta["size"]))

    async def size(self, name: str) -> int | None:
        try:
            with _explained(self.url, name):
                return int((await obstore.head_async(self._store, name))["size"])
        except NotFound:
            return None

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        with _explained(self.url, prefix):
            async for batch in obstore.list(self._store, prefix, chunk_size=_LISTED_AT_ONCE):
                for meta in batch:
                    yield meta["path"], int(meta["size"])

    async def delete(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                with _explained(self.url, name, writes=True):
                    await obstore.delete_async(self._store, name)
            except NotFound:
                continue

    async def sweep(self, before_ms: int) -> int:
        """A request that breaks off leaves nothing."""
        return 0

    async def settle(self, name: str) -> None:
        """What such a store acknowledges or shows is durable."""


class DirectoryObjects(ObstoreObjects):
    """A local directory. Writes go through core/files.py, for obstore syncs nothing.

    An object has its name only when its bytes are durable: what a crash or a failed fsync leaves is never taken for an object.
    Only its owner can read what is made here, for guests' memory lies in it.
    """

    def __init__(self, directory: Path, url: str, disk: Disk = DISK) -> None:
        if not directory.is_dir():
            files.make_dir(directory, mode=_DIRECTORY_MODE, disk=disk)
        super().__init__(LocalStore(directory), url)
        self._directory = directory
        self._disk = disk

    async def put(self, name: str, data: bytes) -> None:
        with self._told(name):
            await asyncio.to_thread(self._write, self._directory / name, data)

    def _write(self, path: Path, data: bytes) -> None:
        temporary = files.temporary_beside(path)
        files.make_dir(path.parent, mode=_DIRECTORY_MODE, disk=self._disk)
        try:
            files.create_file(temporary, data, mode=_OBJECT_MODE, disk=self._disk)
            self._disk.rename(temporary, path)
        except BaseException:
            self._discard(temporary)
            raise
        try:
            self._sync_names(path)
        except BaseException:
            self._discard(path)  # else a look at its size would find it, and take it for durable
            raise

    def _sync_names(self, path: Path) -> None:
        """Every directory down to an object."""
        while path != self._directory:
            path = path.parent
            self._disk.sync_dir(path)
        with suppress(PermissionError):  # a directory that was there may lie in one that we may not read
            self._disk.sync_dir(self._directory.parent)

    def _discard(self, path: Path) -> None:
        with suppress(OSError):  # the first error is the one to tell
            self._disk.unlink(path)

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        async for name, size in super().list(prefix):
            if not files.is_temporary(Path(name)):
                yield name, size

    async def sweep(self, before_ms: int) -> int:
        return await asyncio.to_thread(self._sweep, before_ms)

    def _sweep(self, before_ms: int) -> int:
        swept = 0
        for parent, _, names in os.walk(self._directory):
            for path in (Path(parent, name) for name in names if _LEFT_OVER.search(name)):
                with suppress(OSError):  # its owner has renamed it after all, or the next one may do it
                    if path.lstat().st_mtime_ns <= before_ms * 1_000_000:
                        self._disk.unlink(path)
                        swept += 1
        return swept

    async def settle(self, name: str) -> None:
        path = self._directory / name
        with self._told(name):
            try:
                await asyncio.to_thread(self._disk.sync_file, path)
            except FileNotFoundError as error:
                raise NotFound(f"The object store has no {name}.") from error
            await asyncio.to_thread(self._sync_names, path)

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Errors of writing here, where it is always known that nothing was done."""
        try:
            yield
        except (NoSpace, OSError) as error:
            if isinstance(error, NoSpace) or error.errno in files.FULL:
                raise _no_room(self.url, name, error) from error
            raise Unavailable(
                f"The object store did not take {name}: {error.strerror}.",
                hint="Look at the disk that the store's directory is on; what was not stored is tried again.",
                internal=f"{self.url}: {error}",
            ) from error


def _whole(name: str, data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise Unavailable(f"The object store sent {len(data)} of {length} bytes of {name}.", hint="Try again.")
    return data


@contextmanager
def _explained(url: str, name: str, *, writes: bool = False) -> Iterator[None]:
    """obstore's errors as ours. ``internal`` may hold addresses, so it stays in the log."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"The object store has no {name}.", internal=f"{url}: {error}") from error
    except (BaseError, OSError, ValueError) as error:
        if any(word in str(error) for word in _FULL_WORDS):
            raise _no_room(url, name, error) from error
        raise Unavailable(
            f"The object store did not {'take' if writes else 'give'} {name}: {type(error).__name__}.",
            hint="Look whether the store can be reached and lets this server in; what was not stored is tried again.",
            internal=f"{url}: {error}",
            ambiguous=writes,
        ) from error


def _no_room(url: str, name: str, error: Exception) -> NoSpace:
    return NoSpace(f"There is no room left in the object store to write {name}.", internal=f"{url}: {error}")
