"""How rounds join the suite: a module ``rounds_NAME.py`` beside this one is found by its name. See docs/torture.md.

Such a module defines any of these at its top level:

``KINDS``   rounds of its own, each kind with its source of named points;
``WORKS``   steps for the life of the server that the rounds of ``kills`` kill;
``PARTS``   what that server gets when it starts, and what must hold of it after each recovery.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from perdure.core.crashpoints import CrashPoint
from perdure.workspaces.model import Workspace
from tests.torture.model import Source

if TYPE_CHECKING:
    from tests.torture.life import Life
    from tests.torture.server import Server


@dataclass(frozen=True)
class Place:
    """What a source is made with."""

    scratch: Path  # a directory of the suite's; a source makes its own below it
    image: Path  # made by ``node.make_image``; read only
    random: Random  # where choices come from, so that a seed repeats them
    defect: str | None = None  # switched on in this process already; a child must do that itself
    keep: Path | None = None  # a directory for the homes of what was violated
    points: tuple[str, ...] = ()  # what was asked for; none: everything

    def with_it(self, point: str, others: Iterable[str]) -> list[str]:
        """This point and then those others that are wanted too, for a source that does them in one round."""
        return [point, *(other for other in others if other != point and (not self.points or other in self.points))]


@dataclass(frozen=True)
class Kind:
    """``name`` is that of ``--only``. ``kills_at``: named points of the product that its rounds kill at, so that ``kills`` does
    not; they are named ``POINT server`` (or ``POINT vmm``) among its points. ``is_usual``: runs without ``--all`` too."""

    name: str
    make: Callable[[Place], Source]
    kills_at: frozenset[CrashPoint] = frozenset()
    is_usual: bool = True


@dataclass(frozen=True)
class Work:
    """A step of a life with one workspace, one of ``weight`` in about 140. ``passes``: named points that it can pass, by the
    begin of their names; while one of these is armed, the step is taken more often."""

    name: str
    do: Callable[[Life, Workspace], Awaitable[object]]
    weight: int = 1
    passes: tuple[str, ...] = ()


async def _nothing(_server: Server) -> None:
    return None


@dataclass(frozen=True)
class Part:
    """``begin`` after the server has recovered, ``check`` when all its other invariants hold; it raises Violation. ``mend`` is
    what the timers of a server that lives on do after its database or a machine was lost."""

    begin: Callable[[Server], Awaitable[None]] = _nothing
    check: Callable[[Server], Awaitable[None]] = _nothing
    mend: Callable[[Server], Awaitable[None]] = _nothing


T = TypeVar("T", Kind, Work, Part)


def kinds() -> Iterator[Kind]:
    return _all("KINDS", Kind)


def works() -> Iterator[Work]:
    return _all("WORKS", Work)


def parts() -> Iterator[Part]:
    return _all("PARTS", Part)


def modules() -> list[Any]:
    found = sorted(path.stem for path in Path(__file__).parent.glob("rounds_*.py"))
    return [importlib.import_module(f"tests.torture.{name}") for name in found]


def _all(name: str, kind: type[T]) -> Iterator[T]:
    for module in modules():
        given: Iterable[object] = getattr(module, name, ())
        for one in given:
            if not isinstance(one, kind):
                raise TypeError(f"{name} of {module.__name__} has {one!r}, which is no {kind.__name__}")
            yield one
