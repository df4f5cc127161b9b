"""A Jupyter kernel (ipykernel) as the child of its keeper, and what outlives it on the workspace's disk."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
import time
from typing import Any

#: How long a kernel may take to start.
START_S = 300.0
_PR_SET_PDEATHSIG = 1
_NO_LONGER = "It ended without a word."


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def oom_kills() -> int:
    """How often the kernel of this machine has killed for want of memory."""
    found = re.search(r"^oom_kill (\d+)$", _read("/proc/vmstat"), re.MULTILINE)
    return int(found[1]) if found else 0


class Memory:
    """What outlives a kernel: how many there have been, and why the last one ended."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._boot = _read("/proc/sys/kernel/random/boot_id").strip()
        try:
            known = json.loads(_read(path))
            self.number, ended, boot = int(known["kernel"]), str(known["ended"]), known["boot"]
        except (KeyError, TypeError, ValueError):
            self.number, self.before = 0, ""
        else:
            self.before = ended or (_NO_LONGER if boot == self._boot else "The workspace has booted from its disk since.")

    def write(self, ended: str = "") -> None:
        """Durably, for a machine may go at any time. Raises OSError."""
        aside = self._path + ".new"
        with open(aside, "w", encoding="utf-8") as file:
            json.dump({"kernel": self.number, "boot": self._boot, "ended": ended}, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(aside, self._path)
        directory = os.open(os.path.dirname(self._path), os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)


class Kernel:
    """The child, and Jupyter's protocol with it."""

    def __init__(self, directory: str) -> None:
        import zmq
        from jupyter_client.session import Session

        key = os.urandom(16).hex().encode()
        places = {name + "_port": number for number, name in enumerate(("shell", "iopub", "stdin", "control", "hb"), 1)}
        connection = {"transport": "ipc", "ip": f"{directory}/kernel", "signature_scheme": "hmac-sha256", **places}
        file = f"{directory}/kernel.json"
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as target:
            json.dump({**connection, "key": key.decode()}, target)
        self._oom_before = oom_kills()
        gc.freeze()  # the child shares what is not touched
        self.pid = os.fork()
        if self.pid == 0:
            _become_kernel(file)
        self.pidfd = os.pidfd_open(self.pid)
        context = zmq.Context()
        self.shell, self.control, self.iopub = (context.socket(kind) for kind in (zmq.DEALER, zmq.DEALER, zmq.SUB))
        self.iopub.setsockopt(zmq.SUBSCRIBE, b"")
        for socket_, name in ((self.shell, "shell"), (self.iopub, "iopub"), (self.control, "control")):
            socket_.setsockopt(zmq.RCVHWM, 0)  # what is too much is for the keeper to say
            socket_.setsockopt(zmq.LINGER, 0)
            socket_.connect(f"ipc://{directory}/kernel-{places[name + '_port']}")
        self._session: Any = Session(key=key, username="perdure")
        self._nowait = zmq.NOBLOCK

    def send(self, socket_: Any, kind: str, content: dict[str, Any]) -> str:
        """Returns the message's id, which all answers name."""
        return str(self._session.send(socket_, kind, content=content)["header"]["msg_id"])

    def receive(self, socket_: Any) -> dict[str, Any] | None:
        """The next message that is there, if any."""
        try:
            message: dict[str, Any] | None = self._session.recv(socket_, mode=self._nowait)[1]
        except ValueError:  # not signed by the kernel
            return {"msg_type": "", "parent_header": {}, "content": {}}
        return message

    def await_ready(self) -> str:
        """Returns why it is not: "" once it answers, and its output is heard."""
        import zmq

        poller = zmq.Poller()
        for one in (self.shell, self.iopub, self.pidfd):
            poller.register(one, zmq.POLLIN)
        deadline = time.monotonic() + START_S
        has_replied = is_heard = False
        self.send(self.shell, "kernel_info_request", {})
        while not (has_replied and is_heard):
            left_s = deadline - time.monotonic()
            ready = dict(poller.poll(max(0, int(left_s * 1000))))
            if self.pidfd in ready:
                return f"The kernel ended at once. {self.end()[0]}"
            if not ready:
                return f"The kernel has not answered for {START_S:.0f} s."
            is_heard |= self.iopub in ready and self.receive(self.iopub) is not None
            if self.shell in ready and self.receive(self.shell) is not None:
                has_replied = True
                if not is_heard:  # it had output before anybody was connected to hear it
                    self.send(self.shell, "kernel_info_request", {})
        return ""

    def interrupt(self) -> None:
        """It, and what a cell of it runs in the foreground.

        A cell that awaits has its loop look for the signal only when something else comes, so something does.
        """
        self._signal(signal.SIGINT)
        self.send(self.shell, "kernel_info_request", {})

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass

    def end(self) -> tuple[str, bool]:
        """How it ended, in a sentence, and whether it was for want of memory. It has ended."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._signal(signal.SIGKILL)
        if code == -signal.SIGKILL and oom_kills() > self._oom_before:
            return "The workspace ran out of memory and its kernel killed the process.", True
        return f"It was killed by signal {-code}." if code < 0 else f"It exited with code {code}.", False


def _become_kernel(connection_file: str) -> None:
    """In the child. Never returns."""
    import ctypes

    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        oom_score(0)
        sys.argv[:] = [""]
        sys.path.insert(0, "")  # modules in its working directory, as in any interactive Python
        os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
        os.environ.pop("JPY_PARENT_PID", None)
        from ipykernel.kernelapp import IPKernelApp
        from traitlets.config import Config

        config = Config()
        config.HistoryManager.enabled = False  # a file that forks would share the rest of their lives
        app: Any = IPKernelApp.instance(config=config, connection_file=connection_file, log_level=50)
        app.initialize([])
        app.start()
        code = 0
    finally:
        os._exit(code)


def oom_score(score: int) -> None:
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(str(score))
    except OSError:
        pass  # not its own master: then both are equally likely
