"""Ctrl-C, whatever a library makes of it."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator

import pytest

from perdure.cli import interrupts
from perdure.core.errors import NotFound


@pytest.fixture(autouse=True)
def _listening() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts.listen()
    yield
    signal.signal(signal.SIGINT, before)


def wrapped() -> None:
    """As pydantic does while it builds a model: what was raised becomes a text in an error of its own."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt as error:
        raise ValueError(f"Error building: {error!r}") from None


def test_an_interrupt_that_became_an_error_is_one_again() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts.restored():
        wrapped()


def test_an_error_without_an_interrupt_is_itself() -> None:
    with pytest.raises(ZeroDivisionError), interrupts.restored():
        raise ZeroDivisionError


def test_what_is_said_after_an_interrupt_is_said() -> None:
    with pytest.raises(ValueError, match="Error building"):
        wrapped()
    with pytest.raises(NotFound), interrupts.restored():
        raise NotFound("No such command.")


def test_an_interrupt_that_was_dropped_is_remembered() -> None:
    interrupts.raise_if_came()
    with pytest.raises(ValueError, match="Error building"):
        wrapped()
    with pytest.raises(KeyboardInterrupt):
        interrupts.raise_if_came()
    interrupts.listen()
    interrupts.raise_if_came()


def test_a_select_sees_a_signal_that_came_before_it() -> None:
    with interrupts.waking() as signals:
        assert select.select([signals], [], [], 0)[0] == []
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert select.select([signals], [], [], 0)[0] == [signals]
    assert signal.set_wakeup_fd(-1) == -1


def test_a_program_that_ignores_it_goes_on_ignoring_it() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.listen()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
