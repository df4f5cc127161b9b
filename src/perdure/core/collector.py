"""Python's garbage collector at a program's start.

What is imported stays, and there is much of it. To walk through it again each time that some hundred objects were made, as Python
does by itself, is a sixth of what a start costs.
"""

from __future__ import annotations

import gc

#: Objects that are made before the collector looks at them, while a program starts. A command is over before that happens often.
STARTING = 50_000
_USUAL = gc.get_threshold()


def spare() -> None:
    """Look rarely from here on."""
    gc.set_threshold(STARTING, *_USUAL[1:])


def resume() -> None:
    """Look as often as usual from here on, and no more at what is there now: a walk through all of it takes 100 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_USUAL)
