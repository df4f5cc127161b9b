"""``perdure worker``: serves durable functions. This process takes the invocations; handlers run in processes of their own."""

from __future__ import annotations

import asyncio
import json as jsons
import os
import re
import shlex
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.output import JsonFlag, duration, markup, note, wants_json
from perdure.core.clock import SystemClock
from perdure.core.config import Settings, inherited_environment
from perdure.core.errors import InvalidRequest

if TYPE_CHECKING:
    from perdure.worker.model import Plan
    from perdure.worker.processes import Handlers, Surroundings
    from perdure.worker.runtime import Command

#: Handlers of Python as ``NAME=MODULE:HANDLER``; or a function and the command that serves it.
Asked = tuple[tuple[str, ...], tuple[str, list[str]] | None]
#: Of a function, as the server takes it.
NAME = re.compile(r"^[a-zA-Z0-9_-]{1,64}$")
PYTHON_PLACE = re.compile(r"^[\w.]+:[\w.]+$")
Handler = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME=]MODULE:HANDLER...", help="Of Python; or one FILE.mjs:EXPORT, of Node.js.", show_default=False),
]
Exec = Annotated[str | None, typer.Option("--exec", help="Serve what this command's runtime client runs.", metavar="CMD")]


def worker(
    ctx: typer.Context,
    handlers: Handler = None,
    *,
    command: Exec = None,
    function: Annotated[str | None, typer.Option(help="With --exec: the function that it serves.", metavar="NAME")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="With --exec: the function is not durable.")] = False,
    concurrency: Annotated[int | None, typer.Option(help="Processes; default: two per processor.", min=1, max=1000)] = None,
    limit: Annotated[int | None, typer.Option(help="Invocations of each function at a time, over all workers.", min=1)] = None,
    timeout: Annotated[int, typer.Option(help="Seconds that one invocation may take.", min=1, max=86_400)] = 900,
    name: Annotated[str, typer.Option(help="Of this worker, for people.", metavar="NAME")] = "",
    digest: Annotated[str | None, typer.Option(help="Of the code, in place of the one that is worked out.")] = None,
    recycle: Annotated[int, typer.Option(help="Invocations after which a process is replaced; 0: never.", min=0)] = 1000,
    drain: Annotated[float, typer.Option("--drain-s", help="How long what runs may go on after SIGTERM.", min=0)] = 30.0,
    once: Annotated[bool, typer.Option("--once", help="End when nothing is left to be done.")] = False,
    json: JsonFlag = False,
) -> None:
    """Serve durable functions: take their invocations from the server, and run them in warm processes.

    SIGTERM and Ctrl-C drain it: nothing new is taken, what runs may end; a second one ends it at once.
    What handlers print is printed as it is; with --json on stderr, and one event per line is on stdout.
    """
    from perdure.worker.model import Plan

    as_json = wants_json(ctx, json)
    plan = Plan(name, concurrency or 2 * (os.cpu_count() or 1), timeout, limit, recycle, drain, once)
    asked = _asked(handlers or [], command, function)
    asyncio.run(_serve(asked, plan, is_durable=not plain, digest=digest, as_json=as_json))


def _asked(
    handlers: list[str], command: str | None, function: str | None
) -> tuple[tuple[str, ...], tuple[str, list[str]] | None]:
    """Raises InvalidRequest."""
    from perdure.worker.runtime import BOOTSTRAP, NODE_PLACE

    if (command is None) == (not handlers) or (command is None) != (function is None):
        raise InvalidRequest("Nothing to serve, or too much.", hint="Name handlers, or a command by --exec with its --function.")
    if command is not None and function is not None:
        argv = shlex.split(command)
        if not argv:
            raise InvalidRequest("The command of --exec is empty.", hint="Write --exec 'node app.mjs'.")
        return (), (_checked(function), argv)
    named = [_named(one) for one in handlers]
    if of_node := [(one, place) for one, place in named if NODE_PLACE.match(place)]:
        if len(named) > 1:
            raise InvalidRequest("A worker serves one function of Node.js, and no other.", hint="Start a worker for each.")
        return (), (of_node[0][0], ["node", str(BOOTSTRAP), of_node[0][1]])
    if len({one for one, _ in named}) < len(named):
        raise InvalidRequest("Two handlers have the same name.", hint="Write NAME=MODULE:HANDLER.")
    for _, place in named:
        if not PYTHON_PLACE.match(place):
            raise InvalidRequest(f"{place!r} is not a handler.", hint="Write MODULE:HANDLER, such as app:main.")
    return tuple(f"{one}={place}" for one, place in named), None


def _named(handler: str) -> tuple[str, str]:
    name, _, place = handler.rpartition("=")
    return _checked(name or place.rpartition(":")[2]), place


def _checked(name: str) -> str:
    if not NAME.match(name):
        raise InvalidRequest(f"{name!r} is not a function's name.", hint="Use 1 to 64 letters, digits, - and _; or NAME=PLACE.")
    return name


async def _serve(
    asked: tuple[tuple[str, ...], tuple[str, list[str]] | None],
    plan: Plan,
    *,
    is_durable: bool,
    digest: str | None,
    as_json: bool,
) -> None:
    from perdure.sdk import AsyncClient
    from perdure.worker.contact import Contact
    from perdure.worker.door import Door
    from perdure.worker.pool import Pool
    from perdure.worker.processes import Handlers, Surroundings
    from perdure.worker.service import Worker

    tell = Teller(as_json=as_json)
    places, of_command = asked
    async with AsyncClient(settings=Settings()) as client, Door(client.target) as door:
        inherited = {"PYTHONUNBUFFERED": "1", **inherited_environment()}  # what is printed before a process is killed is not lost
        around = Surroundings(door.environment(inherited), quiet_stdout=as_json)
        source: Handlers | Command = Handlers(places, around)
        if of_command is not None:
            source = _command(of_command, around, is_durable=is_durable)
        pool: Pool[Any] = Pool(source.start, plan.concurrency, plan.recycle_after, tell)
        worker = Worker(plan, Contact(client, tell), pool, SystemClock(), tell)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, worker.drain)
        try:
            await worker.run(digest)
        finally:
            await pool.close()


def _command(asked: tuple[str, list[str]], around: Surroundings, *, is_durable: bool) -> Command:
    from perdure.worker import runtime
    from perdure.worker.model import Served

    name, argv = asked
    place = runtime.NODE_PLACE.match(argv[-1])
    files = [*argv, place[1]] if place else argv
    return runtime.Command(tuple(argv), Served(name, runtime.digest(files), is_durable), around)


# ------------------------------------------------------------------------------------------------------------------------- output


class Teller:
    """What happens, a line for each: JSON on stdout, or words on stderr."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def __call__(self, kind: str, **fields: Any) -> None:
        if self._as_json:
            moment = SystemClock().now().isoformat(timespec="milliseconds")
            sys.stdout.write(jsons.dumps({"event": kind, "at": moment, **fields}) + "\n")
            sys.stdout.flush()
        else:
            note(line(kind, fields))


def line(kind: str, fields: dict[str, Any]) -> str:
    """An event in words, as rich markup."""
    match kind:
        case "registered":
            names = ", ".join(markup(one["name"]) + ("" if one["durable"] else " (plain)") for one in fields["functions"])
            return f"Worker [bold]{markup(fields['worker'])}[/] serves {names}"
        case "invoked":
            return f"[dim]{_flight(fields)} begins[/]"
        case "ended":
            colour = "red" if fields["result"] in {"failed", "raised", "timed-out", "invalid"} else "green"
            why = f": {markup(fields['message'])}" if fields.get("message") else ""
            return f"{_flight(fields)} [{colour}]{markup(fields['result'])}[/] after {duration(fields['seconds'])}{why}"
        case "server-away":
            return f"[yellow]The server does not answer[/]: {markup(fields['message'])} Trying until it does."
        case "server-back":
            return "The server answers again"
        case "draining":
            return f"Nothing is taken any more; {fields['flights']} running have {duration(fields['limit_s'])} to end"
        case "start-failed":
            return f"[red]A process could not be started[/]: {markup(fields['message'])}"
        case _:
            return markup(f"{kind} {fields.get('message', '')}".strip())


def _flight(fields: dict[str, Any]) -> str:
    return f"{markup(fields['function'])} {markup(fields['execution_id'])} #{fields['invocation']}"
