"""Ctrl-C that cannot get lost on its way up.

Python raises KeyboardInterrupt wherever the program is. Where that is inside native code which calls back, such as pydantic's
when it builds a model for the first time, it comes out as another error or not at all.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from perdure.core.errors import PerdureError

_came = threading.Event()


def listen() -> None:
    """From now on the program remembers that Ctrl-C came. One that ignores it, or has its own handler, keeps that."""
    _came.clear()
    is_ours_to_handle = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours_to_handle and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _handle)


def _handle(_number: int, _frame: FrameType | None) -> None:
    _came.set()
    raise KeyboardInterrupt


def raise_if_came() -> None:
    if _came.is_set():
        raise KeyboardInterrupt


@contextmanager
def restored() -> Iterator[None]:
    """Whatever a Ctrl-C became within, outside it is KeyboardInterrupt."""
    try:
        yield
    except PerdureError:
        raise  # meant so
    except Exception as error:
        if _came.is_set():
            raise KeyboardInterrupt from error
        raise


@contextmanager
def waking() -> Iterator[int]:
    """A descriptor that becomes readable with each signal, for a select that would miss one which came just before it."""
    reading, writing = socket.socketpair()
    with reading, writing:
        reading.setblocking(False)
        writing.setblocking(False)
        before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        try:
            yield reading.fileno()
        finally:
            signal.set_wakeup_fd(before)
