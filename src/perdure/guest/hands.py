"""Hands: threads of the agent that live inside the user's root and do file work there, one operation at a time each.

The agent's own thread must answer a wake within milliseconds, so it never touches the user's disk. A hand has a root directory
of its own (a thread may), the user's, so that links and ``..`` cannot lead outside. Threads and not processes: each switch to
another address space costs an emulated guest its translation caches, a millisecond, more than most operations. One hand or two
wait for work; when all are busy another is started, and one that hangs (a dead FUSE mount, say) hurts nobody else: whoever
waited gives up, and the hand ends when it comes back.
"""

from __future__ import annotations

import _thread
import json
import os
import sys
from _queue import SimpleQueue

from perdure.guest import linux
from perdure.guest.worker import Refusal, refusal_of
from perdure.wire.guest.ops import Code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from perdure.guest.loop import Loop

    Work = Callable[["Talk", dict[str, Any]], None]
    OnPacket = Callable[[str, Any], None]

_KEPT = 2
_MOST = 64
_STACK_BYTES = 512 * 1024


class Tag:
    """What a hand says; all but GO, TOOK and DATA end the operation."""

    OVER = "over"  # JSON: done, and this is the result
    GO = "go"  # JSON: bytes may flow
    DATA = "data"  # bytes
    TOOK = "took"  # so many bytes were written
    END = "end"  # all data was given
    WRITTEN = "written"  # JSON: the file has its name
    REFUSED = "refused"  # (code, message)


class Talk:
    """A hand's end of the conversation."""

    def __init__(self, loop: Loop, hand: Hand) -> None:
        self._loop = loop
        self._hand = hand
        self.turn = 0

    def say(self, tag: str, value: Any = None) -> None:
        """JSON for a dict: the agent's thread has enough to do."""
        body = json.dumps(value, separators=(",", ":")).encode() if isinstance(value, dict) else value
        self._loop.post(lambda: self._hand.deliver(tag, body))

    def listen(self) -> Any:
        """The next thing the agent says; raises Refusal when it does not want the operation any more."""
        while True:
            turn, word = self._hand.inbox.get()
            if word is None:
                self._hand.inbox.put((turn, None))  # for whoever listens next: the thread ends
                raise Refusal(Code.STALE, "The transfer was broken off.")
            if turn == self.turn:
                return word  # else a late word on an operation that is over

    def check(self) -> None:
        """In the middle of long work that needs no words: raises Refusal when nobody wants it any more."""
        if self.has_word:
            heard = self._hand.inbox.get()
            self._hand.inbox.put(
                heard
            )  # room to send, which comes ahead of being asked for; or the end, for whoever listens next
            if heard[1] is None:
                raise Refusal(Code.STALE, "The transfer was broken off.")

    @property
    def has_word(self) -> bool:
        return not self._hand.inbox.empty()


class Hand:
    """One thread, as the agent sees it."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self.failed = False  # its thread ended by a defect: nothing may be asked of it any more
        self._turn = 0
        self._on_packet: OnPacket | None = None

    def ask(self, request: dict[str, Any], on_packet: OnPacket) -> None:
        """Begin an operation. ``on_packet(tag, value)`` gets what the hand says."""
        self._on_packet = on_packet
        self._turn += 1
        self.inbox.put((self._turn, request))

    def say(self, word: Any) -> None:
        self.inbox.put((self._turn, word))

    def deliver(self, tag: str, value: Any) -> None:
        if self._on_packet is not None:
            self._on_packet(tag, value)

    def release(self) -> None:
        """The operation is over."""
        self._on_packet = None

    def drop(self) -> None:
        """Let it go: it undoes what it began, as soon as it can, and ends."""
        self._on_packet = None
        self.inbox.put((self._turn, None))


class Hands:
    """All of them. Those that hang count, too: they end when what they wait for does."""

    def __init__(self, loop: Loop, root: str, works: dict[str, Work]) -> None:
        self._loop = loop
        self._root = root
        self._works = works
        self._idle: list[Hand] = []
        self._alive = 0
        self.begun = 0
        """Operations so far."""

    @property
    def busy(self) -> int:
        """Hands that work, those whose operation nobody waits for any more too."""
        return self._alive - len(self._idle)

    def take(self) -> Hand:
        """One that waits, or a new one. Raises Refusal when too many are busy."""
        self.begun += 1
        if self._idle:
            return self._idle.pop()
        if self._alive >= _MOST:
            raise Refusal(Code.BUSY, f"{_MOST} file operations are under way; wait for one of them.")
        return self._start()

    def give(self, hand: Hand) -> None:
        """Back from an operation that is over."""
        hand.release()
        if hand.failed:
            return
        if len(self._idle) < _KEPT:
            self._idle.append(hand)
        else:
            hand.drop()

    def warm(self) -> None:
        """Have one waiting, so that the first operation after a wake need not start it."""
        if not self._idle:
            self._idle.append(self._start())

    def _start(self) -> Hand:
        hand = Hand()
        _thread.stack_size(_STACK_BYTES)
        _thread.start_new_thread(self._live, (hand,))
        self._alive += 1
        return hand

    def _ended(self) -> None:
        self._alive -= 1

    def _live(self, hand: Hand) -> None:
        """The thread: operations until it is dropped."""
        talk, problem = Talk(self._loop, hand), None
        try:
            try:
                linux.unshare(linux.CLONE_FS)
                os.chroot(self._root)
                os.chdir("/")
                os.umask(0o022)
            except OSError as error:
                problem = refusal_of(error, "the workspace's root")
            while True:
                turn, request = hand.inbox.get()
                if request is None:
                    return
                if turn > talk.turn:
                    talk.turn = turn
                    _work(talk, self._works[request["op"]], request, problem)
        except Exception as error:  # noqa: BLE001 - the top of a thread: it must end here and say why
            sys.stderr.write(f"files: {error!r}\n")
            hand.failed = True
            talk.say(Tag.REFUSED, (Code.FAILED, f"The agent failed at this: {error!r}."))
        finally:
            self._loop.post(self._ended)


def _work(talk: Talk, work: Work, request: dict[str, Any], problem: Refusal | None) -> None:
    try:
        if problem is not None:
            raise problem
        work(talk, request)
    except Refusal as refusal:
        talk.say(Tag.REFUSED, (refusal.code, refusal.message[:2000]))
    except OSError as error:
        why = refusal_of(error, str(error.filename or request["path"]))
        talk.say(Tag.REFUSED, (why.code, why.message[:2000]))
    except (ValueError, TypeError, KeyError, MemoryError) as error:
        talk.say(Tag.REFUSED, (Code.FAILED, f"The agent failed at this: {error!r}."))
    finally:
        if "root" in request:
            os.chdir("/")  # where ``within`` has left it; a directory that somebody is in cannot be unmounted
