"""A line on a terminal that moves while something long goes on."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from perdure.cli.output import console

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Bar:
    """On stderr, and gone when the block ends; nothing at all when ``quiet`` or without a terminal (``is_shown``).

    It first appears with ``show``: what is over at once shows nothing.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = console(stderr=True)
        self.is_shown = self._console.is_terminal and not quiet
        self._progress: Progress | None = None
        self._task: TaskID

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, words: str, done: float | None = None, total: float | None = None) -> None:
        """What goes on, in rich markup, and how much of it is done; without a total nobody knows."""
        if not self.is_shown:
            return
        if self._progress is None:
            self._progress = self._begin(words)
        self._progress.update(self._task, description=words, completed=done or 0, total=total)

    def _begin(self, words: str) -> Progress:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn("line"), TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
        begun = Progress(*columns, console=self._console, transient=True)
        self._task = begun.add_task(words, total=None)
        begun.start()
        return begun
