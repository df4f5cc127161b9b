"""Two listeners over one application: a keyless Unix socket that only its owner can open, and TCP that always needs a key. Where
an operator wants it, a third one on loopback that tells metrics and nothing else."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from perdure.api.app import create_app
from perdure.api.confined import Confined
from perdure.api.guard import MetricsGuard, SocketGuard, TcpGuard
from perdure.api.ingress.front import HostForm, PathForm
from perdure.api.ingress.names import Domain
from perdure.api.proxies import BehindProxies, networks
from perdure.api.services import Services
from perdure.api.throttle import Throttle
from perdure.api.traffic import Traffic
from perdure.api.underway import Underway
from perdure.core.errors import Conflict, HostUnfit

SOCKET_PATH_BYTES_MAX = 107
#: Answers that have not ended this long after the stop are cut.
STOP_GRACE_S = 5


class ApiServer:
    """Serves ``services`` until ``stop``. Raises Conflict when another server holds the socket or the port."""

    def __init__(self, services: Services) -> None:
        self._services = services
        text = services.settings.ingress_domain
        self._domain = None if text is None else Domain.parse(text)  # a mistake is told before anything listens
        self._proxies = networks(services.settings.trusted_proxies)
        self._app = create_app(services)
        self._underway: Underway = self._app.state.underway
        self._watch: asyncio.Task[None] | None = None
        self._running: list[tuple[_Listener, asyncio.Task[None]]] = []
        self.port = 0  # of TCP, known after ``start``

    async def start(self) -> None:
        """Returns when both listeners answer."""
        settings = self._services.settings
        unix = bind_unix(settings.api_socket)
        tcp: list[socket.socket] = []
        try:
            tcp.append(bind_tcp(settings.listen_host, settings.listen_port))
            if settings.metrics_port:
                tcp.append(bind_tcp("127.0.0.1", settings.metrics_port, "PERDURE_METRICS_PORT"))
        except BaseException:
            for sock in (unix, *tcp):
                sock.close()
            settings.api_socket.unlink(missing_ok=True)
            raise
        self.port = int(tcp[0].getsockname()[1])
        self._app.state.port = self.port
        underway = self._underway
        self._watch = asyncio.create_task(underway.watch(), name="underway")
        api = Confined(self._app, self._services.confinement)
        inside = PathForm(api, self._services, underway)
        await self._listen(SocketGuard(inside, self._services, underway), unix)
        await self._listen(self._outside(inside), tcp[0], is_outside=True)
        if settings.metrics_port:
            await self._listen(MetricsGuard(api, underway), tcp[1])

    def _outside(self, inside: ASGIApp) -> ASGIApp:
        """What TCP meets first."""
        throttle = Throttle(self._services.settings, self._services.clock)
        guard = TcpGuard(inside, self._services, throttle, self._underway)
        if self._domain is None:
            return guard
        return HostForm(guard, self._services, throttle, self._domain, self._underway)

    async def stop(self) -> None:
        """Take no more requests, tell open streams, wait for the rest a few seconds. Safe to call twice."""
        self._underway.stop()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        running, self._running = self._running, []
        for listener, _ in running:
            listener.should_exit = True
        await asyncio.gather(*(task for _, task in running))
        if running:
            self._services.settings.api_socket.unlink(missing_ok=True)

    async def _listen(self, app: ASGIApp, sock: socket.socket, *, is_outside: bool = False) -> None:
        traffic = Traffic(app, self._services.clock)
        config = uvicorn.Config(
            BehindProxies(traffic, self._proxies) if is_outside and self._proxies else traffic,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            http="h11",  # it refuses what two parsers could read in two ways
            ws="websockets-sansio",
            ws_per_message_deflate=False,
            proxy_headers=False,
            timeout_graceful_shutdown=STOP_GRACE_S,
        )
        listener = _Listener(config)
        task = asyncio.create_task(listener.serve(sockets=[sock]))
        ready = asyncio.create_task(listener.ready.wait())
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            ready.cancel()
            await task
        self._running.append((listener, task))


class _Listener(uvicorn.Server):
    """uvicorn without its signal handlers, and with an event instead of a flag for being ready."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind_unix(path: Path) -> socket.socket:
    """A listening socket with mode 0600 in a 0700 directory; what a dead server left is replaced, a living one is a Conflict."""
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise HostUnfit(f"The socket path {path} is too long for a Unix socket.", hint="Choose a shorter PERDURE_HOME.")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise HostUnfit(f"{path} is in the way: it is not a socket.", hint=f"Move {path} elsewhere.")
        if answers(path):
            raise Conflict(f"A Perdure server already answers at {path}.", hint="Use it, or stop it with 'perdure down'.")
        path.unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)  # the socket must not be open to others even between bind and chmod
    try:
        sock.bind(str(path))
    finally:
        os.umask(mask)
    path.chmod(0o600)
    sock.setblocking(False)
    return sock


def answers(path: Path) -> bool:
    """Whether a process listens on the Unix socket ``path``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def bind_tcp(host: str, port: int, setting: str = "PERDURE_LISTEN_PORT") -> socket.socket:
    """Raises Conflict when the port is taken and HostUnfit when the address is not this machine's."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise HostUnfit(
            f"The listen address {host!r} cannot be resolved: {error.strerror}.", hint="Set PERDURE_LISTEN_HOST."
        ) from error
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise Conflict(
            f"The API cannot listen on {host}:{port}: {error.strerror}.",
            hint=f"Set {setting} to another port, or 0 for {'any free one' if setting == 'PERDURE_LISTEN_PORT' else 'none'}.",
        ) from error
    sock.setblocking(False)
    return sock
