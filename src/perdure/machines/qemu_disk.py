"""The root disk of a QEMU machine: its chain of layers as an explicit block graph, every file by descriptor.

``d0``, the raw node the device hangs on, stays for the machine's life; below it is the active layer, below that the frozen
ones. Frozen layers are given to QEMU read-only. The active one comes with two descriptors, so that QEMU can reopen it
read-only when it is frozen; the writable one is taken away then.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import Any

from perdure.core.errors import Busy, Conflict, InvalidRequest, MachineDied, MachineFailed, NotFound
from perdure.machines.driver import DiskChain, DiskLayer
from perdure.machines.qemu_args import ROOT_NODE
from perdure.machines.qmp import Event, QmpClient, QmpError

STREAM_JOB = "collapse"
#: Seconds a stream of layers may take; it moves what the guest wrote since the last one.
STREAM_DEADLINE_S = 1800.0
CANCEL_DEADLINE_S = 30.0


@dataclass(slots=True)
class _Node:
    layer: DiskLayer
    name: str
    fdset: int
    writable_fd: int | None  # QEMU's number of it, within the set
    owned: bool  # added by its own command, so it must be deleted by one


class RootDisk:
    """Drives the block graph over QMP. One caller at a time, but for ``cancel_stream``."""

    def __init__(self, qmp: QmpClient) -> None:
        self._qmp = qmp
        self._nodes: list[_Node] = []
        self._opened: list[_Node] = []  # ahead of ``attach``
        self._pending: _Node | None = None
        self._retired: list[_Node] = []
        self._count = 0
        self._stream: asyncio.Future[Event] | None = None
        self._collapsed = asyncio.Event()

    @property
    def chain(self) -> DiskChain:
        """The layers in use now, bottom first."""
        return DiskChain(tuple(node.layer for node in self._nodes))

    async def open_below(self, chain: DiskChain) -> None:
        """Open layers that the disk will probably lie on, so that ``attach`` has less to do."""
        for layer in chain.layers:
            node = await self._hand_over(layer, writable=False, owned=True)
            below = self._opened[-1].name if self._opened else None
            await self._qmp.execute("blockdev-add", _options(node, backing=below))
            self._opened.append(node)

    async def attach(self, chain: DiskChain) -> None:
        """Replace the placeholder. Raises InvalidRequest, NotFound, or MachineFailed when QEMU cannot use a layer."""
        if not chain.layers:
            raise InvalidRequest("A machine's disk needs at least one layer.")
        nodes = await self._reusable(chain)
        options: dict[str, Any] | str | None = nodes[-1].name if nodes else None
        for number, layer in enumerate(chain.layers[len(nodes) :], start=len(nodes) + 1):
            top = number == len(chain.layers)
            node = await self._hand_over(layer, writable=top, owned=top)
            options = _options(node, backing=options)
            nodes.append(node)
        assert isinstance(options, dict), "the layer on top is never one that was opened ahead"
        await self._qmp.execute("blockdev-add", options)
        raw = {"driver": "raw", "node-name": ROOT_NODE, "file": nodes[-1].name, "discard": "unmap"}
        await self._qmp.execute("blockdev-reopen", {"options": [raw]})
        await self._qmp.execute("blockdev-del", {"node-name": "ph"})
        self._nodes = nodes

    async def _reusable(self, chain: DiskChain) -> list[_Node]:
        """The nodes that were opened ahead, if this disk lies on them; otherwise they are closed."""
        opened, self._opened = self._opened, []
        if tuple(node.layer for node in opened) == chain.layers[: len(opened)] and len(opened) < len(chain.layers):
            return opened
        for node in reversed(opened):
            await self._delete(node)
        return []

    async def open_overlay(self, layer: DiskLayer) -> None:
        """Open the next layer. One opened before and not used is let go."""
        if layer.format != "qcow2":
            raise InvalidRequest(f"A layer that goes on top of others must be qcow2, not {layer.format}.")
        node = await self._hand_over(layer, writable=True, owned=True)
        try:
            await self._qmp.execute("blockdev-add", _options(node, backing=None))
        except QmpError:
            await self._drop_fds(node)
            raise
        previous, self._pending = self._pending, node
        if previous is not None:
            await self._delete(previous)
        await self.tidy()

    async def switch(self) -> None:
        """Freeze the active layer and write to the one opened last. Raises Conflict when none is open."""
        if self._pending is None:
            raise Conflict("No next disk layer is open.", hint="Call open_overlay first.")
        active = self._nodes[-1]
        await self._qmp.execute("blockdev-snapshot", {"node": active.name, "overlay": self._pending.name})
        self._nodes.append(self._pending)
        self._pending = None
        self._retired.append(active)

    def flush_file(self) -> None:
        """Have the host write the active layer's file out. Blocks; a speed-up, so errors are left to QEMU's own flush."""
        if not self._nodes:
            return
        with contextlib.suppress(OSError):
            fd = os.open(self._nodes[-1].layer.path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)

    async def tidy(self) -> None:
        """Take the writable descriptors of frozen layers away; outside of a pause, because it can wait."""
        while self._retired:
            node = self._retired.pop()
            if node.writable_fd is not None:
                await self._qmp.execute("remove-fd", {"fdset-id": node.fdset, "fd": node.writable_fd})
                node.writable_fd = None

    async def collapse(self, keep: int) -> None:
        """Copy all but the lowest ``keep`` layers into the active one. Raises Busy when a capture interrupts it."""
        if keep < 1:
            raise InvalidRequest(f"At least one layer must be kept, not {keep}.")
        if self._stream is not None:
            raise Conflict("The disk's layers are being collapsed already.")
        if len(self._nodes) - keep <= 1:
            return
        self._stream = asyncio.get_running_loop().create_future()
        self._collapsed.clear()
        try:
            await self._collapse(keep, self._stream)
        finally:
            self._stream = None
            self._collapsed.set()

    async def _collapse(self, keep: int, ended: asyncio.Future[Event]) -> None:
        active, base, dropped = self._nodes[-1], self._nodes[keep - 1], self._nodes[keep:-1]
        # The header's backing name is never used; without one given, QEMU would write a descriptor's name there.
        options = {"job-id": STREAM_JOB, "device": active.name, "base-node": base.name, "backing-file": "base"}
        await self._qmp.execute("block-stream", options)
        try:
            async with asyncio.timeout(STREAM_DEADLINE_S):
                event = await asyncio.shield(ended)
        except BaseException:
            await self._abandon(ended)
            raise
        if event["event"] == "BLOCK_JOB_CANCELLED":
            raise Busy("Collapsing the disk's layers was interrupted by a capture.", hint="Call it again after the capture.")
        if "error" in event["data"]:
            raise MachineFailed(f"The disk's layers could not be collapsed: {event['data']['error']}")
        self._nodes = [*self._nodes[:keep], active]
        for node in reversed(dropped):
            await self._delete(node)

    async def cancel_stream(self) -> None:
        """Stop a running collapse and wait until it has stopped; nothing to do when there is none."""
        if self._stream is None:
            return
        try:
            await self._qmp.execute("block-job-cancel", {"device": STREAM_JOB, "force": True})
        except QmpError as error:
            if error.error_class != "DeviceNotActive":  # it ended just now
                raise
        # Until the caller of collapse has left, too: the graph must not change under it.
        async with asyncio.timeout(CANCEL_DEADLINE_S):
            await self._collapsed.wait()

    def on_job_event(self, event: Event) -> None:
        """BLOCK_JOB_COMPLETED and BLOCK_JOB_CANCELLED."""
        if self._stream is not None and not self._stream.done() and event["data"].get("device") == STREAM_JOB:
            self._stream.set_result(event)

    def on_death(self) -> None:
        """The VMM is gone: end a running collapse."""
        if self._stream is not None and not self._stream.done():
            self._stream.set_exception(MachineDied("The virtual machine ended while its disk layers were collapsed."))
            self._stream.exception()

    async def _abandon(self, ended: asyncio.Future[Event]) -> None:
        """The caller leaves (cancelled, or too late): the job must not go on behind its back."""
        if ended.done() or not self._qmp.is_open:
            return
        try:
            await self._qmp.execute("block-job-cancel", {"device": STREAM_JOB, "force": True})
            async with asyncio.timeout(CANCEL_DEADLINE_S):  # until it has stopped, or the next collapse finds the layer busy
                await asyncio.shield(ended)
        except (QmpError, MachineDied, TimeoutError):
            return

    async def _hand_over(self, layer: DiskLayer, *, writable: bool, owned: bool) -> _Node:
        """Give QEMU the layer's descriptors. The read-only one makes the set, the writable one joins it."""
        self._count += 1
        fdset = (await self._send_fd(layer, os.O_RDONLY, {}))["fdset-id"]
        node = _Node(layer, f"layer{self._count}", fdset, None, owned)
        if writable:
            try:
                node.writable_fd = (await self._send_fd(layer, os.O_RDWR, {"fdset-id": fdset}))["fd"]
            except BaseException:
                await self._drop_fds(node)
                raise
        return node

    async def _send_fd(self, layer: DiskLayer, flags: int, arguments: dict[str, Any]) -> Any:
        try:
            fd = os.open(layer.path, flags | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"The disk layer {layer.path.name} does not exist.", internal=str(layer.path)) from None
        except OSError as error:
            raise MachineFailed(
                f"The disk layer {layer.path.name} cannot be opened: {error.strerror}.", internal=str(layer.path)
            ) from error
        try:
            return await self._qmp.execute("add-fd", arguments, fd=fd)
        finally:
            os.close(fd)

    async def _drop_fds(self, node: _Node) -> None:
        if self._qmp.is_open:
            await self._qmp.execute("remove-fd", {"fdset-id": node.fdset})

    async def _delete(self, node: _Node) -> None:
        if node.owned:
            await self._qmp.execute("blockdev-del", {"node-name": node.name})
        await self._drop_fds(node)


def _options(node: _Node, backing: dict[str, Any] | str | None) -> dict[str, Any]:
    """A layer's whole node: protocol below, format above, what is under it in full or by name (null: nothing yet).

    The protocol node takes ``read-only`` from the format node: said explicitly, it would stay writable when the layer is frozen.
    """
    read_only = node.writable_fd is None
    file = {
        "driver": "file",
        "node-name": f"{node.name}-file",
        "filename": f"/dev/fdset/{node.fdset}",
        "locking": "off",
        "discard": "unmap",
    }
    options: dict[str, Any] = {"driver": node.layer.format, "node-name": node.name, "read-only": read_only, "file": file}
    options["discard"] = "unmap"
    if node.layer.format == "qcow2":
        options["backing"] = backing
    elif backing is not None:
        raise InvalidRequest("A raw layer can only be the lowest of a disk.")
    return options
