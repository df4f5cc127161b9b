"""Runs in the workspace, under its own python3: starts a Jupyter kernel (ipykernel), and passes cells to it one after the other.

    cell.py ──┐  lines of JSON over a Unix socket        Jupyter's protocol over Unix sockets
    cell.py ──┼─────────────────────────────────► keeper ───────────────────────────────────► kernel, its child
    cell.py ──┘

Kernel and keeper live and end together. A kernel that waits costs nothing: no timer runs, and nobody polls. The sockets are in
a directory that only its user can enter. A file on the disk remembers that there was a kernel, so that whoever comes after it, be
it after a boot, is told that what it had in memory is gone.

Started with one line of JSON: ``dir`` for sockets, ``state`` for what outlives a boot, ``context``. Says one line of JSON when
the kernel is ready, or why there is none.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import sys
import time
from collections import deque
from importlib import import_module
from typing import Any

from perdure.api.kernels.inside.kernel import Kernel, Memory, oom_score
from perdure.api.kernels.inside.runs import Client, Run, line_of

NEEDED = ("zmq", "jupyter_client.session", "ipykernel.kernelapp")
#: From the first interrupt of a cell that has had its time to the second; each wait is twice the one before, for under emulation
#: the first one alone takes seconds to be told. When the third is due, its caller is told that it does not stop.
PATIENCE_S = 10.0
#: How long a kernel that waits may take to end when it is asked to; what it had said before its end, to arrive; and, after its
#: reply, each next piece of what the cell has said.
STOP_S, LAST_WORDS_S, NEXT_WORD_S = 5.0, 2.0, 15.0


class Keeper:
    """The loop. It ends with its kernel."""

    def __init__(self, kernel: Kernel, listener: socket.socket, memory: Memory, patience_s: float) -> None:
        import zmq

        self._kernel = kernel
        self._patience_s = patience_s
        self._listener = listener
        self._memory = memory
        self._news = memory.before  # for the first cell
        self._clients: dict[int, Client] = {}
        self._waiting: deque[Run] = deque()
        self._run: Run | None = None
        self._stopping: list[Client] = []
        self._is_ending = False
        self._kill_at: float | None = None
        self._poller = zmq.Poller()
        self._in, self._out = zmq.POLLIN, zmq.POLLOUT
        for one in (kernel.shell, kernel.iopub, kernel.pidfd, listener.fileno()):
            self._poller.register(one, self._in)

    def live(self) -> None:
        """Returns when the kernel has ended."""
        while True:
            ready = dict(self._poller.poll(self._patience_ms()))
            for socket_ in (self._kernel.iopub, self._kernel.shell):
                if socket_ in ready:
                    self._hear(socket_)
            for fd in [fd for fd in ready if fd in self._clients]:
                self._serve(self._clients[fd], ready[fd])
            if self._listener.fileno() in ready:
                self._accept()
            if self._kernel.pidfd in ready:
                self._on_death()
                return
            self._on_time(time.monotonic())
            self._begin()
            for client in tuple(self._clients.values()):
                self._flush(client)

    # -------------------------------------------------------------------------------------------------------- time

    def _patience_ms(self) -> int | None:
        run = self._run
        times = [self._kill_at, *((run.due, run.stuck_at, run.done_by) if run else ())]
        known = [moment for moment in times if moment is not None]
        return None if not known else max(0, int((min(known) - time.monotonic()) * 1000) + 1)

    def _on_time(self, now: float) -> None:
        run = self._run
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._kernel.kill()
        if run is None:
            return
        if run.due is not None and now >= run.due:
            if run.status == "ok":
                run.status, run.stuck_at = "timeout", now + 3 * self._patience_s
            run.due = now + self._patience_s * 2**run.interrupts
            run.interrupts += 1
            self._kernel.interrupt()
        if run.stuck_at is not None and now >= run.stuck_at:
            run.stuck_at = None
            run.client.say({"type": "stuck"})
        if run.done_by is not None and now >= run.done_by:  # the kernel had said more than it could keep
            run.is_truncated = True
            self._end_run()

    # ------------------------------------------------------------------------------------------------------ kernel

    def _hear(self, socket_: Any) -> None:
        while (message := self._kernel.receive(socket_)) is not None:
            run = self._run
            if run is None or message["parent_header"].get("msg_id") != run.message_id:
                continue
            if socket_ is self._kernel.iopub:
                run.on_output(message["msg_type"], message["content"])
            elif message["msg_type"] == "execute_reply":
                run.reply, run.due, run.stuck_at = message["content"], None, None
            if run.reply is not None:
                run.done_by = time.monotonic() + NEXT_WORD_S
            if run.reply is not None and run.is_idle:
                self._end_run()

    def _end_run(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()

    def _begin(self) -> None:
        """The next cell, if its turn has come."""
        if self._run is not None or not self._waiting or self._is_ending:
            return
        run = self._run = self._waiting.popleft()
        started: dict[str, Any] = {"type": "started", "kernel": self._memory.number, "restarted": bool(self._news)}
        if self._news:
            started["reason"], self._news = self._news, ""
        run.client.say(started)
        content = {"code": run.code, "silent": False, "store_history": True, "user_expressions": {}}
        run.message_id = self._kernel.send(
            self._kernel.shell, "execute_request", {**content, "allow_stdin": False, "stop_on_error": False}
        )
        if run.limit_s is not None:
            run.due = time.monotonic() + run.limit_s

    def _on_death(self) -> None:
        """Tell everybody: who waits can wait for another one, and what ran is not known to have run."""
        detail, is_oom = self._kernel.end()
        if self._is_ending:
            detail, is_oom = "It was restarted on request.", False
        deadline = time.monotonic() + LAST_WORDS_S
        while self._run is not None and self._poller.poll(100) and time.monotonic() < deadline:
            heard = self._run.client.to_send[:]
            self._hear(self._kernel.iopub)
            self._hear(self._kernel.shell)
            if self._run is not None and self._run.client.to_send == heard:
                break
        if self._run is not None:
            self._run.client.finish({"type": "died", "detail": detail, "oom": is_oom})
        try:
            self._memory.write(ended=detail)
        except OSError:
            pass  # then the next one says less
        self._listener.close()
        for run in self._waiting:
            run.client.say({"type": "absent"})
        for client in self._stopping:
            client.finish({"type": "stopped"})
        for client in self._clients.values():
            client.socket.setblocking(True)
            client.socket.settimeout(LAST_WORDS_S)
            self._send_rest(client)

    @staticmethod
    def _send_rest(client: Client) -> None:
        try:
            client.socket.sendall(client.to_send)
        except OSError:
            pass

    # ----------------------------------------------------------------------------------------------------- clients

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        client = Client(connection)
        self._clients[connection.fileno()] = client
        self._poller.register(connection.fileno(), self._in)

    def _serve(self, client: Client, mask: int) -> None:
        if not mask & ~self._out:
            return
        try:
            received = client.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._gone(client)
            return
        client.received += received
        if received.endswith(b"\n"):
            try:
                self._ask(client, json.loads(client.received))
            except (KeyError, TypeError, ValueError) as error:
                client.finish({"type": "failed", "detail": f"The request is not understood: {error!r}."})

    def _ask(self, client: Client, request: dict[str, Any]) -> None:
        if request["op"] == "run":
            ahead = len(self._waiting) + (self._run is not None)
            self._waiting.append(Run(client, request))
            if ahead:
                client.say({"type": "queued", "ahead": ahead})
        elif request["op"] == "interrupt":
            run = self._run
            if run is not None:
                self._kernel.interrupt()
                run.status = "interrupted" if run.status == "ok" else run.status
            client.finish({"type": "interrupted", "running": run is not None})
        elif request["op"] == "stop":
            self._stopping.append(client)
            if not self._is_ending:
                self._is_ending = True
                self._kill_at = time.monotonic() + (0.0 if self._run is not None else STOP_S)
                self._kernel.send(self._kernel.control, "shutdown_request", {"restart": False})
        else:
            raise ValueError(request["op"])

    def _flush(self, client: Client) -> None:
        try:
            client.flush()
        except OSError:
            self._gone(client)
            return
        if client.is_over and not client.to_send:
            self._gone(client)
        else:
            self._poller.modify(client.socket.fileno(), self._in | (self._out if client.to_send else 0))

    def _gone(self, client: Client) -> None:
        """It has heard everything, or was killed: then its cell is not wanted any more."""
        if self._clients.pop(client.socket.fileno(), None) is None:
            return
        self._poller.unregister(client.socket.fileno())
        client.socket.close()
        self._waiting = deque(run for run in self._waiting if run.client is not client)
        self._stopping = [one for one in self._stopping if one is not client]
        run = self._run
        if run is not None and run.client is client:
            run.status, run.due = "interrupted", time.monotonic()


def _listen(path: str) -> socket.socket:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    listener.setblocking(False)
    return listener


def _is_answered(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


def _keep(directory: str, memory: Memory, say: int, patience_s: float) -> None:
    """The keeper's own process. ``say`` is where its starter listens."""
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    oom_score(-800)  # of the two it is the small one
    with open(f"{directory}/pid", "w", encoding="ascii") as file:
        file.write(str(os.getpid()))
    kernel = Kernel(directory)
    problem = kernel.await_ready()
    if not problem:
        try:
            memory.number += 1
            memory.write()
        except OSError as error:
            problem = f"What has to outlive a boot cannot be written: {error.strerror}."
    if problem:
        kernel.kill()
        os.write(say, line_of({"type": "failed", "detail": problem}))
        return
    listener = _listen(f"{directory}/socket")
    ready = {"type": "ready", "kernel": memory.number, "restarted": bool(memory.before), "reason": memory.before}
    os.write(say, line_of(ready))
    os.close(say)
    Keeper(kernel, listener, memory, patience_s).live()


def _start(request: dict[str, Any]) -> dict[str, Any] | bytes:
    """What to say of it."""
    context = str(request["context"])
    directory, state = f"{request['dir']}/{context}", str(request["state"])
    for path, mode in ((str(request["dir"]), 0o755), (directory, 0o700), (state, 0o755)):
        os.makedirs(path, mode, exist_ok=True)
    lock = os.open(f"{directory}/lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # two callers at once
    memory = Memory(f"{state}/{context}.json")
    if _is_answered(f"{directory}/socket"):
        return {"type": "ready", "kernel": memory.number, "restarted": False, "reason": ""}
    try:
        for name in NEEDED:
            import_module(name)
    except ImportError as error:
        return {"type": "missing", "detail": str(error)}
    hear, say = os.pipe()
    if os.fork() == 0:
        os.close(lock)
        os.close(hear)
        try:
            _keep(directory, memory, say, float(request.get("patience_s", PATIENCE_S)))
        finally:
            os._exit(0)
    os.close(say)
    with open(hear, "rb") as answer:
        return answer.readline() or {"type": "failed", "detail": "The kernel could not be started."}


def main() -> None:
    request = json.loads(sys.stdin.buffer.readline())
    signal.alarm(0)  # all of it has come
    try:
        answer = _start(request)
    except OSError as error:
        answer = {"type": "failed", "detail": f"{error}."}
    sys.stdout.buffer.write(answer if isinstance(answer, bytes) else line_of(answer))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
