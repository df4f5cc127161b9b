"""``perdure shell``: a terminal in a workspace, at the terminal that this is run from."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from typing import Annotated, Any

import typer

from perdure.cli import terminal
from perdure.cli.execs import OWN_FAILURE
from perdure.cli.output import JsonFlag, Status, dump, markup, note, wants_json
from perdure.cli.workspaces import Name, find, pairs, tell_losses
from perdure.core.config import terminal_kind
from perdure.core.errors import InvalidRequest
from perdure.sdk import AsyncClient, AsyncPty, AsyncWorkspace, ConnectionLost, Workspace
from perdure.wire import public
from perdure.wire.node import ExecEnd

_READ_BYTES = 65536


def shell(
    ctx: typer.Context,
    name: Name,
    *,
    attach: Annotated[str | None, typer.Option(metavar="ID", help="Go on in a shell that was left.")] = None,
    cwd: Annotated[str | None, typer.Option(help="Directory to begin in.")] = None,
    user: Annotated[str | None, typer.Option("--user", "-u", help="User in the workspace; default root.")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="KEY=VALUE; repeatable.")] = None,
    detach_keys: Annotated[str, typer.Option(metavar="KEYS", help="Keys that leave it running; 'none' for no keys.")] = (
        terminal.DETACH_KEYS
    ),
    json: JsonFlag = False,
) -> Status:
    """Open a shell in a workspace; ends with the shell's exit code, or 0 when it is left running by the detach keys.

    Ctrl-C goes to what runs in it. A shell that is left goes on, through sleep and wake, until it ends or its workspace does.
    """
    ctx.find_root().obj.failure_code = OWN_FAILURE
    as_json = wants_json(ctx, json)
    keys = terminal.parse_keys(detach_keys)
    fd = _terminal()
    workspace = find(name)
    options: dict[str, Any] = {"envs": {**_kind(), **pairs(env, "--env")}}
    options |= {key: value for key, value in (("cwd", cwd), ("user", user)) if value is not None}
    sitting = _Sitting(fd, keys, detach_keys)
    outcome = asyncio.run(sitting.run(workspace, attach, options))
    if as_json:
        dump({"exec_id": sitting.exec_id, "detached": outcome is None, "outcome": outcome})
    else:
        _tell(workspace, sitting.exec_id, outcome)
    if outcome is None:
        return Status(128 + sitting.ended_by if sitting.ended_by else 0)
    return Status(OWN_FAILURE if outcome.exit_code is None else outcome.exit_code)


def _terminal() -> int:
    try:
        fd = sys.stdin.fileno()
    except (OSError, ValueError):
        fd = -1
    if fd < 0 or not os.isatty(fd):
        raise InvalidRequest("A shell needs a terminal to run in.", hint="In a script use 'perdure exec NAME -- COMMAND'.")
    return fd


def _kind() -> dict[str, str]:
    """So that programs there know what they draw on here."""
    kind = terminal_kind()
    return {"TERM": kind} if kind else {}


def _tell(workspace: Workspace, exec_id: str, outcome: public.ExecOutcome | None) -> None:
    if outcome is None:
        note(f"Left. It goes on: 'perdure shell {markup(workspace.name)} --attach {markup(exec_id)}'.")
    elif outcome.end is ExecEnd.NOT_STARTED:
        note(f"[yellow]The shell could not be started. ({markup(outcome.detail)})[/]")
    elif outcome.end is ExecEnd.LOST:
        note("[yellow]The shell was lost with the machine it ran on.[/]")
    elif outcome.end not in {ExecEnd.EXITED, ExecEnd.SIGNALED}:
        note(f"[yellow]The shell was ended: {markup(outcome.end.value)}.[/]")


class _Sitting:
    """A person at a shell."""

    def __init__(self, fd: int, keys: bytes, shown_keys: str) -> None:
        self._fd = fd
        self._keys = terminal.Keys(keys)
        self._shown_keys = shown_keys if keys else ""
        self._screen = terminal.Screen()
        self._typed: asyncio.Queue[bytes] = asyncio.Queue()
        self._over = asyncio.Event()
        self._resizes: set[asyncio.Task[None]] = set()
        self.exec_id = ""
        self.ended_by = 0  # the signal that ended this program

    async def run(self, workspace: Workspace, attach: str | None, options: dict[str, Any]) -> public.ExecOutcome | None:
        """Until the shell has ended; None when it was left before that."""
        async with AsyncClient() as client:
            here = AsyncWorkspace(workspace.info, client)
            rows, cols = terminal.size(self._fd)
            pty = await (here.pty.connect(attach) if attach is not None else here.pty.create(rows, cols, **options))
            self.exec_id = pty.exec_id
            workspace.report = here.report
            tell_losses(workspace)
            if self._shown_keys:
                note(f"Leave it running with {self._shown_keys.replace(',', ' ')}.")
            async with pty:
                with terminal.raw(self._fd):
                    await self._attend(pty)
            return pty.outcome

    async def _attend(self, pty: AsyncPty) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._fd, self._on_typed)
        loop.add_signal_handler(signal.SIGWINCH, self._on_resize, pty)
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_end, number)
        show, feed = asyncio.create_task(self._show(pty)), asyncio.create_task(self._feed(pty))
        over: asyncio.Task[Any] = asyncio.create_task(self._over.wait())
        try:
            # After it is attached to, and the same size again too: what shows there has to be drawn here.
            self._on_resize(pty)
            await asyncio.wait({show, feed, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(self._fd)
            for number in (signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)
            tasks: list[asyncio.Task[Any]] = [show, feed, over, *self._resizes]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if pty.outcome is None:
                self._restore()
        for task in (show, feed):
            if not task.cancelled():
                task.result()

    def _restore(self) -> None:
        with suppress(OSError):  # it is gone, and nobody sees it
            terminal.write(sys.stdout.fileno(), self._screen.ordinary())

    def _on_typed(self) -> None:
        try:
            data = os.read(self._fd, _READ_BYTES)
        except OSError:
            data = b""
        sent, left = self._keys.feed(data)
        if sent:
            self._typed.put_nowait(sent)
        if left or not data:
            self._over.set()

    def _on_end(self, number: signal.Signals) -> None:
        self.ended_by = int(number)
        self._over.set()

    def _on_resize(self, pty: AsyncPty) -> None:
        task = asyncio.ensure_future(self._resize(pty))
        self._resizes.add(task)
        task.add_done_callback(self._resizes.discard)

    async def _resize(self, pty: AsyncPty) -> None:
        with suppress(ConnectionLost, OSError):  # the terminal there keeps the size that it has until the next change
            await pty.resize(*terminal.size(self._fd))

    async def _show(self, pty: AsyncPty) -> None:
        stdout = sys.stdout.fileno()
        async for data in pty:
            self._screen.shown(data)
            try:
                terminal.write(stdout, data)
            except OSError:
                return  # this terminal is gone; the shell there is not

    async def _feed(self, pty: AsyncPty) -> None:
        while True:
            typed = await self._typed.get()
            try:
                await pty.send(typed)
            except ConnectionLost:
                continue  # as on any line that is down: what is typed goes nowhere
