"""Where backups lie: a directory or an object store that holds nothing else.

::

    perdure-backups.json      says that this is such a place
    backups/ID.begun          a backup was begun
    backups/ID.json           it is complete: ``record``
    SCOPE/packs  SCOPE/items  what backups share, as in an object store (docs/object-store.md)

Nothing is ever removed from a place by Perdure but what a killed backup was still writing, and no object is written twice under
one name but its mark.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from perdure.backup.ledger import PlaceLedger
from perdure.backup.record import BackupRecord, StoredItem, read_record
from perdure.core.errors import Conflict, CorruptData, InvalidRequest, NotFound
from perdure.core.files import make_dir
from perdure.snapshots.objects.client import ClientSettings, Objects, open_objects
from perdure.snapshots.objects.download import Downloader
from perdure.snapshots.objects.keys import Keyring, PlainKeyring
from perdure.snapshots.objects.remote import OWNER, Remote
from perdure.snapshots.objects.upload import put

MARK = "perdure-backups.json"
KIND = "perdure backups"
_RECORDS = "backups/"
_WHERE = "Name the place that 'perdure backup' was given."
_SCHEMES = ("file", "s3", "gs", "az")


def place_url(given: str) -> str:
    """A directory's path or a URL as a URL. Raises InvalidRequest."""
    if "://" not in given:
        if not given.strip():
            raise InvalidRequest("The place for the backup has no name.", hint="Name a directory, or s3://BUCKET/PREFIX.")
        return Path(given).absolute().as_uri()
    if urlsplit(given).scheme not in _SCHEMES:
        raise InvalidRequest(
            f"{given!r} cannot hold a backup.", hint="Use a directory, s3://bucket, gs://bucket or az://container."
        )
    return given


def directory_of(url: str) -> Path | None:
    """Of a local place."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


class Tools:
    """What moves bytes in and out of a place, and the ledger that they share."""

    def __init__(self, remote: Remote, ledger: PlaceLedger) -> None:
        self.remote = remote
        self.ledger = ledger
        self.downloader = Downloader(remote, ledger)


class Place:
    def __init__(self, objects: Objects, url: str, now_ms: Callable[[], int]) -> None:
        self.url = url
        self._objects = objects
        self._now_ms = now_ms

    def tools(self, keyring: Keyring, only: Iterable[StoredItem] | None = None) -> Tools:
        """With ``only``: to read these items of it."""
        remote = Remote(self._objects, keyring, self._now_ms)
        return Tools(remote, PlaceLedger(remote, self._now_ms, only))

    # ---------------------------------------------------------------------------------------------------------------- writing

    async def prepare(self) -> None:
        """Make sure that backups may be put here. Raises Conflict when it holds something else, Unavailable."""
        if await self._is_marked():
            await self._objects.settle(MARK)
            await self._remote_for_put().sweep()
            return
        if await self._objects.size(OWNER) is not None:
            raise Conflict(
                f"{self.url} is the object store of an installation, not a place for backups.",
                hint="Name another directory, bucket or prefix.",
            )
        async for name, _ in self._objects.list(""):
            raise Conflict(
                f"{self.url} holds something that is no backup of Perdure ({name}).",
                hint="Name an empty directory or prefix, or one with earlier backups.",
            )
        await put(self._remote_for_put(), MARK, json.dumps({"kind": KIND}).encode() + b"\n")

    async def begin(self, backup_id: str) -> None:
        """On record that a backup was begun: one that has no manifest later was not finished."""
        await put(self._remote_for_put(), f"{_RECORDS}{backup_id}.begun", b"{}\n")

    async def finish(self, record: BackupRecord) -> None:
        """From here on the backup exists."""
        await put(self._remote_for_put(), f"{_RECORDS}{record.id}.json", record.to_bytes())

    def _remote_for_put(self) -> Remote:
        return Remote(self._objects, PlainKeyring(), self._now_ms)

    # ---------------------------------------------------------------------------------------------------------------- reading

    async def _is_marked(self) -> bool:
        try:
            found = json.loads(await self._objects.get(MARK))
        except NotFound:
            return False
        except ValueError as error:
            raise CorruptData(f"The mark {MARK} of {self.url} is damaged.", hint="Name another place.") from error
        return isinstance(found, dict) and found.get("kind") == KIND

    async def listed(self) -> tuple[list[str], list[str]]:
        """Ids of backups that are complete, and of those that were only begun; both oldest first."""
        names = [name.removeprefix(_RECORDS) async for name, _ in self._objects.list(_RECORDS)]
        whole = {name.removesuffix(".json") for name in names if name.endswith(".json")}
        begun = {name.removesuffix(".begun") for name in names if name.endswith(".begun")}
        return sorted(whole), sorted(begun - whole)

    async def find(self, backup_id: str | None) -> BackupRecord:
        """One by its id, or the newest that is complete.

        Raises NotFound (saying what is here), CorruptData when its manifest is damaged, HostUnfit when a newer release made it.
        """
        if not await self._is_marked():
            raise NotFound(
                f"There are no backups of Perdure in {self.url}.", hint="Name the place that 'perdure backup' was given."
            )
        whole, begun = await self.listed()
        wanted = backup_id or (whole[-1] if whole else None)
        if wanted is None:
            left = f"{len(begun)} were begun and not finished" if begun else "none was begun"
            raise NotFound(
                f"No backup in {self.url} is complete; {left}.", hint="Run 'perdure backup' again; it goes on from there."
            )
        if wanted not in whole:
            shown = ", ".join(whole[-5:]) or "none"
            half = " was begun and not finished" if wanted in begun else " does not exist"
            raise NotFound(f"The backup {wanted}{half} in {self.url}.", hint=f"Complete ones: {shown}.")
        return read_record(await self._objects.get(f"{_RECORDS}{wanted}.json"), wanted)


def open_place(given: str, now_ms: Callable[[], int], *, make: bool, options: ClientSettings | None = None) -> Place:
    """``make``: a directory that is not there is made, and closed to others, for what lies there is as secret as what it is of.

    Raises InvalidRequest, NotFound.
    """
    url = place_url(given)
    directory = directory_of(url)
    if directory is not None and not directory.exists():
        if not make:
            raise NotFound(f"There is no directory {directory}.", hint=_WHERE)
        try:
            make_dir(directory, mode=0o700)
        except OSError as error:
            raise InvalidRequest(f"The directory {directory} cannot be made: {error.strerror}.") from error
    return Place(open_objects(url, options), url, now_ms)
