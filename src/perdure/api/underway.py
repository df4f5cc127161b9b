"""What is under way, and what it was let in by: a key or a share link. What has lost that ends before its time.

Every request has an ``Ending``, and answers that last (streams, WebSockets, requests to ports, uploads) watch it; whatever
answers once ends as it would have. A revocation by this server is looked for at once; one by another server of the same
database, and the end that a key or a link was given, within ``LOOK_S``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from starlette.requests import HTTPConnection

from perdure.access.shares import ShareRevoked
from perdure.access.tokens import Grant
from perdure.api.services import Services
from perdure.core.errors import PerdureError, Unauthenticated
from perdure.core.ids import KeyId
from perdure.core.pauses import pause

log = logging.getLogger(__name__)

#: How often it is asked whether keys and links that let something in still count.
LOOK_S = 5.0
#: Of a request's ``Ending``, in its ASGI scope.
ENDING = "perdure.ending"

#: What a request was let in by; None of one that came over the Unix socket or with the key file's key.
Leave = KeyId | Grant


class Ending(asyncio.Event):
    """Set when a request has to end: because the server stops or, with ``why``, because what let it in counts no more."""

    why: PerdureError | None = None

    def reason(self, stopping: PerdureError) -> PerdureError:
        """What its client is told: ``stopping`` where it is the server that ends."""
        return stopping if self.why is None else self.why.twin()


def ending_of(connection: HTTPConnection) -> Ending:
    return cast("Ending", connection.scope[ENDING])


class Underway:
    """``watch`` is a task of the server; ``stop`` is for its end."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._endings: dict[Leave | None, set[Ending]] = {}
        self._is_stopping = False

    @contextmanager
    def request(self, leave: Leave | None) -> Iterator[Ending]:
        """For as long as a request lasts."""
        ending = Ending()
        if self._is_stopping:
            ending.set()
        ours = self._endings.setdefault(leave, set())
        ours.add(ending)
        try:
            yield ending
        finally:
            ours.discard(ending)
            if not ours and self._endings.get(leave) is ours:
                del self._endings[leave]

    def stop(self) -> None:
        """The server stops: what lasts ends, and so does what comes now."""
        self._is_stopping = True
        for ending in [one for ours in self._endings.values() for one in ours]:
            ending.set()

    async def look(self) -> None:
        """End what was let in by something that counts no more."""
        keys = [leave for leave in self._endings if isinstance(leave, str)]
        grants = [leave for leave in self._endings if isinstance(leave, Grant)]
        if keys:
            for key_id in await self._services.access.ended(keys):
                self._end(key_id, _key_ended())
        if grants:
            for grant in await self._services.shares.ended(grants):
                self._end(grant, ShareRevoked("This share link has been taken back, or has expired."))

    def _end(self, leave: Leave, why: PerdureError) -> None:
        for ending in self._endings.get(leave, ()):
            ending.why = why
            ending.set()

    async def watch(self) -> None:
        while True:
            await pause(LOOK_S)
            try:
                await self.look()
            except PerdureError as error:  # what the database does not say now it says at the next look
                log.warning("keys and links of what is under way could not be looked at: %s (%s)", error.message, error.internal)
            except Exception:
                log.exception("looking after what is under way failed in a way nobody foresaw")


def _key_ended() -> Unauthenticated:
    return Unauthenticated("The API key was revoked, or has expired.", hint="Go on with a key that counts.")
