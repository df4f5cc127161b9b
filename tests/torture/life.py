"""Lives of a server: a process that reads orders and forks one server for each, which recovers, checks, works and is killed.

The forking process imports everything once and runs no thread, so that a life begins in milliseconds. Orders come on stdin, one
JSON object a line; what happens goes to stdout, one line each: ``born PID``, ``violation TEXT``, ``checked``, ``working``,
``fired``, ``told``, ``ended CODE``. Everything else that is printed goes to stderr. SIGUSR1 asks a life what it waits for,
SIGUSR2 tells it that the database runs again.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import structlog

from perdure.core import crashpoints
from perdure.core.errors import PerdureError
from perdure.core.ids import NodeId
from perdure.db.database import Database
from perdure.workspaces.model import CreateWorkspace, Snapshot, Workspace, WorkspaceKind, WorkspaceState
from tests.torture.defects import switched_on
from tests.torture.ledger import Ledger
from tests.torture.machine import TortureMachine
from tests.torture.model import told_by
from tests.torture.node import PATH, small_thresholds, text
from tests.torture.registry import Work, works
from tests.torture.server import CTX, Server

WORKSPACES_MAX = 4
WEIGHT_OF_WANTED = 60
CAPTURES = 2
WORK_S = 8.0  # what has not fired by then is left to another round
DATABASE_DEADLINE_S = 30.0
STEPS_BACK_S = (3600.0, 86400.0, 3.0)


@dataclass(frozen=True)
class Order:
    """One life. ``crash``: a line of ``core.crashpoints``. ``kills``: the process that dies there in place of the server.
    ``kills_agent``: what dies in place of a machine is its guest's agent.
    ``steps``: 0 only recovers and checks."""

    home: str
    image: str
    url: str
    node_id: str
    seed: int
    steps: int
    checks: bool
    crash: str | None = None
    kills: int | None = None
    kills_agent: bool = False
    clock_back: bool = False
    defect: str | None = None

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


#: A life is told its order, and how to say a line.
Live = Callable[[Order, Callable[[str], None]], Coroutine[Any, Any, None]]


def main(live: Live) -> None:
    protocol = os.dup(1)
    os.dup2(2, 1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    logging.disable(logging.WARNING)

    def say(line: str) -> None:
        os.write(protocol, line.replace("\n", " ").encode() + b"\n")

    for line in sys.stdin:
        order = Order(**json.loads(line))
        pid = os.fork()
        if pid == 0:
            _live_and_die(live, order, say)
        say(f"born {pid}")
        _, status = os.waitpid(pid, 0)
        say(f"ended {os.waitstatus_to_exitcode(status)}")


def _kill_in_its_place(victim: int, _pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)


def kill_agent(machine: int) -> None:
    """The agent of the guest in this machine, which goes on."""
    TortureMachine.by_pid[machine].kill_agent()


def _live_and_die(live: Live, order: Order, say: Callable[[str], None]) -> None:
    """Ends this process, without the order that an exit would bring."""
    code = 1
    try:
        with small_thresholds(), switched_on(order.defect):
            asyncio.run(live(order, say))
        code = 0
    except Exception as error:
        say(f"violation {told_by(error)[0]}")
    finally:
        sys.stderr.flush()
        os._exit(code)


class Life:
    """One server, from its start to its end."""

    def __init__(self, order: Order, say: Callable[[str], None]) -> None:
        self._order = order
        self._say = say
        self._random = Random(order.seed)
        self._home = Path(order.home)
        self._crash_file = self._home / "crash"
        self._fired = False
        self._is_armed = False
        self._is_back = False
        self._killed_machine = False  # on purpose: what it lost is in branches
        self._given_up_before: set[str] = set()  # when the server before this one died
        self._started_again = asyncio.Event()

    async def live(self) -> None:
        order = self._order
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._tell_what_is_awaited)
        loop.add_signal_handler(signal.SIGUSR2, self._started_again.set)
        database = Database(order.url)
        await database.open()
        ledger = Ledger(self._home / "ledger")
        self.server = Server(database, self._home, Path(order.image), NodeId(order.node_id), ledger)
        await self.server.start()
        if order.checks:
            await self._check()
        if not order.steps:
            return
        if order.crash is not None:
            self._crash_file.write_text(order.crash)
            crashpoints.arm(self._crash_file)
            self._is_armed = True
        if order.kills is not None:
            crashpoints._kill = partial(_kill_in_its_place, order.kills)
        if order.kills_agent:
            crashpoints._kill = kill_agent
        self._given_up_before = {one.id for one in await self._given_up()}
        self._say("working")
        until = time.monotonic() + WORK_S
        for _ in range(order.steps):
            if time.monotonic() > until:
                return
            await self._attempt(self._step())
            if self._has_fired():
                self._say("fired")
                await self._database_back()
                await self._check_nothing_given_up()
                await self.server.mend()
                await self._check()
                return

    def _tell_what_is_awaited(self) -> None:
        for task in asyncio.all_tasks():
            task.print_stack(file=sys.stderr)
        faulthandler.dump_traceback(sys.stderr)
        sys.stderr.flush()
        self._say("told")

    async def _database_back(self) -> None:
        """Somebody starts it again, and tells by a signal; then a server looks which of its connections are dead."""
        if not self._is_database_away:
            return
        async with asyncio.timeout(DATABASE_DEADLINE_S):
            await self._started_again.wait()
            while self._is_database_away:
                with suppress(PerdureError):
                    await self.server.database.renew()
                    await self.server.service.find(CTX)
                    self._is_back = True

    @property
    def _is_database_away(self) -> bool:
        """It was killed, and has not answered since."""
        return self._order.kills is not None and self._has_fired() and not self._is_back

    async def _check_nothing_given_up(self) -> None:
        """The death of an agent is not that of its machine: what the guest had in memory, it has."""
        if not self._order.kills_agent or self._killed_machine:
            return
        for one in await self._given_up():
            if one.id not in self._given_up_before:
                self._say(f"violation {one.name}, {one.state.value}: an agent died, and its machine was given up")

    async def _given_up(self) -> list[Workspace]:
        found = await self.server.service.find(CTX)
        return [one for one in found if one.kind is WorkspaceKind.LOST or one.state is WorkspaceState.FAILED]

    async def _check(self) -> None:
        """No fault falls into it: what it finds would be that fault."""
        if self._is_database_away:
            return
        armed, crashpoints._armed = crashpoints._armed, None
        try:
            await self.server.check(self._random)
        except Exception as error:
            self._say(f"violation {told_by(error)[0]}")
        finally:
            crashpoints._armed = armed  # with the passes that it has counted
        self._say("checked")

    def _has_fired(self) -> bool:
        return self._fired or (self._is_armed and not self._crash_file.exists())

    # ---------------------------------------------------------------------------------------------------------------- work

    async def _step(self) -> None:
        if self._order.clock_back and self._random.random() < 0.3:
            self._step_back()
        found = [one for one in await self.server.service.find(CTX) if one.state is not WorkspaceState.DELETED]
        facts = self.server.ledger.facts
        known = [one for one in found if one.id in facts and facts[one.id].is_known]  # of others nobody could say what must hold
        if not known or (len(found) < WORKSPACES_MAX and self._random.random() < 0.15):
            await self._attempt(self._create())
            return
        one = self._random.choice(known)
        steps = {step: self._weight(step, len(found)) for step in (*STEPS, *works())}
        step = self._random.choices(list(steps), list(steps.values()))[0]
        await self._attempt(step.do(self, one))
        await self.server.settle()

    def _weight(self, step: Work, workspaces: int) -> int:
        """What the armed point lies in is done more often, for the other things seldom pass it."""
        if (step.name == "fork" and workspaces >= WORKSPACES_MAX) or (step.name == "delete" and workspaces <= 2):
            return 0
        is_wanted = (self._order.crash or "").startswith(step.passes) if step.passes else False
        return max(step.weight, WEIGHT_OF_WANTED) if is_wanted else step.weight

    async def _attempt(self, work: Awaitable[object]) -> None:
        """An error of the product is an answer: nothing was acknowledged."""
        with suppress(PerdureError):
            await work

    def _step_back(self) -> None:
        seconds = self._random.choice(STEPS_BACK_S)
        self.server.clock.offset_s -= seconds
        self.server.database.shift_clock(-seconds)
        self._fired = self._random.random() < 0.2  # after some of them

    async def _create(self) -> None:
        name = f"w{self._random.randrange(1 << 32):08x}"
        workspace, _ = await self.server.service.create(CTX, CreateWorkspace(name))
        self.server.ledger.note("born", workspace.id, values=[0])

    async def _put(self, one: Workspace) -> None:
        ledger = self.server.ledger
        value = ledger.values + 1
        async with self.server.service.awake(CTX, one.id) as awake:
            ledger.note("putting", one.id, value=value)
            await awake.guest.write_file(PATH, text(value))
            ledger.note("put", one.id, value=value)

    async def _checkpoint(self, one: Workspace, name: str | None = None) -> Snapshot:
        snapshot = await self.server.service.checkpoint(CTX, one.id, name=name)
        self.server.ledger.note("captured", one.id, snapshot=snapshot.id, name=name)
        return snapshot

    async def _named(self, one: Workspace) -> None:
        await self._checkpoint(one, f"s{self._random.randrange(1 << 32):08x}")

    async def _sleep(self, one: Workspace) -> None:
        _, snapshot = await self.server.service.sleep(CTX, one.id)
        self.server.ledger.note("captured", one.id, snapshot=snapshot.id)

    async def _wake(self, one: Workspace) -> None:
        await self.server.service.wake(CTX, one.id)

    async def _fork(self, one: Workspace) -> None:
        allowed = sorted(self._allowed(one))
        self.server.ledger.note("moving", one.id, values=allowed)  # one that is awake is captured for it: its head may be that
        for child in await self.server.service.fork(CTX, one.id, 2):
            if isinstance(child, Workspace) and allowed:
                self.server.ledger.note("born", child.id, values=allowed)

    def _allowed(self, one: Workspace) -> set[int]:
        facts = self.server.ledger.facts.get(one.id)
        return set() if facts is None else set(facts.allowed)

    async def _rewind(self, one: Workspace) -> None:
        ledger = self.server.ledger
        targets = [found.id for found in await self.server.service.snapshots(CTX, one.id) if found.id in ledger.snapshots]
        if targets:
            target = self._random.choice(targets)
            ledger.note("moving", one.id, values=sorted(ledger.snapshots[target]))
            await self._attempt(self.server.service.rewind(CTX, one.id, target))
            await self._check()

    async def _promote(self, one: Workspace) -> None:
        """Any branch whose parent is still there; without one, there will be."""
        ledger = self.server.ledger
        found = [found for found in await self.server.service.find(CTX) if self._allowed(found)]
        names = {found.id for found in found}
        branches = [found for found in found if found.parent_id in names]
        if branches:
            one = self._random.choice(branches)
            ledger.note("moving", str(one.parent_id), values=sorted(self._allowed(one)))
            ledger.note("deleting", one.id)
            await self._attempt(self.server.service.promote(CTX, one.id))
            await self._check()
        elif len(found) < WORKSPACES_MAX:
            await self._fork(one)
        else:
            await self._delete(one)

    async def _delete(self, one: Workspace) -> None:
        self.server.ledger.note("deleting", one.id)
        await self.server.service.delete(CTX, one.id)

    async def _die(self, one: Workspace) -> None:
        """Where it goes on, and what is kept beside it, is looked at before anything else happens to it."""
        await self._attempt(self._put(one))  # so that there is a machine, and news on its disk
        machine = self.server.node.machines.get(one.id)
        if machine is not None:
            self._killed_machine = True
            await machine.kill()
            await self.server.service.upkeep.reconcile()  # notices it, if its event has not come yet
            await self.server.settle()
            await self._check()

    async def _remove(self, one: Workspace) -> None:
        """A snapshot that it was told of, as its owner would remove it; refused where somebody stands on it."""
        ledger, service = self.server.ledger, self.server.service
        own = [found.id for found in await service.snapshots(CTX, one.id) if found.id not in ledger.named]
        for snapshot in own[-2:]:
            await self._attempt(service.remove_snapshot(CTX, one.id, snapshot))
        await service.upkeep.clean()

    async def _compact(self, one: Workspace) -> None:
        """What the background does some time after it fell asleep. Captures of one wake that are gone then are worth it."""
        taken = []
        for _ in range(CAPTURES):
            await self._put(one)
            taken.append(await self._checkpoint(one))
        await self._put(one)
        await self._sleep(one)
        for snapshot in taken:
            await self._attempt(self.server.service.remove_snapshot(CTX, one.id, snapshot.id))
        await self.server.service.upkeep.clean()
        await self.server.node.compact()


#: What a life does, and which named points each can pass. New workspaces come beside them, and pass ``BIRTH``.
STEPS = (
    Work("put", Life._put, 30),
    Work("checkpoint", Life._checkpoint, 20, ("checkpoint.", "capture.", "layers.")),
    Work("named", Life._named, 5),
    Work("sleep", Life._sleep, 20, ("hibernate.", "capture.", "reap.", "start.", "wake.")),
    Work("wake", Life._wake, 20, ("wake.", "start.", "reap.")),
    Work("remove", Life._remove, 5, ("reap.",)),
    Work("compact", Life._compact, 2, ("compact.",)),
    Work("fork", Life._fork, 10, ("fork.", "delete.", "start.", "promote.")),
    Work("delete", Life._delete, 5, ("delete.", "fork.")),
    Work("die", Life._die, 5, ("salvage.",)),
    Work("rewind", Life._rewind, 5, ("rewind.",)),
    Work("promote", Life._promote, 5, ("promote.",)),
)
BIRTH = ("create.",)


async def _live(order: Order, say: Callable[[str], None]) -> None:
    await Life(order, say).live()


if __name__ == "__main__":
    main(_live)
