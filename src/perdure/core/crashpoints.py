"""Named places at which a test makes the server, or a machine's VMM, die by SIGKILL. Off unless ``arm`` was called.

A crash that must be survived has to be repeatable, so what works in steps passes a named point between any two of them. An armed
process looks, at each point, into one file (setting ``crash_file``): a line ``POINT VICTIM HIT``, for instance
``capture.written server 1``. At the HIT-th pass of that point since the line was first seen, the victim is killed. The file is
removed before, so that a server started again lives, and so that the file's absence proves that the fault happened.
"""

from __future__ import annotations

import os
import select
import signal
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from perdure.core.errors import InvalidRequest

#: A killed VMM is waited for, so that what comes after the point meets a dead one every time.
DEATH_DEADLINE_S = 30.0


class CrashPoint(StrEnum):
    """``start`` is behind create, wake, fork, reboot, rewind and promote; ``capture`` behind checkpoint and hibernate, and behind
    a rewind or promotion of what is awake."""

    CREATE_RECORDED = "create.recorded"  # the row says creating, the node knows nothing
    WAKE_RECORDED = "wake.recorded"  # the row says waking, the node knows nothing
    START_RECORDED = "start.recorded"  # the node's live record is durable, no machine yet
    START_CLAIMED = "start.claimed"  # machine: a VMM, nothing in it
    START_RESTORED = "start.restored"  # machine: memory, disk and devices are in, it stands still
    START_RUNNING = "start.running"  # machine: the guest runs, no handshake yet
    START_AWAKE = "start.awake"  # machine: the guest has answered, nobody knows
    START_REPORTED = "start.reported"  # the node is done, the row not yet
    START_COMMITTED = "start.committed"  # the row says running, the caller does not know
    CHECKPOINT_RECORDED = "checkpoint.recorded"  # the snapshot's row is pending
    HIBERNATE_RECORDED = "hibernate.recorded"  # the row says hibernating
    CAPTURE_READY = "capture.ready"  # machine: the guest runs; directory and next layer are made
    CAPTURE_PAUSED = "capture.paused"  # machine: stands still, nothing of it is saved
    CAPTURE_COPIED = "capture.copied"  # machine: devices are saved, pages copied, the layer switched
    CAPTURE_WRITTEN = "capture.written"  # every file is durable but the manifest
    CAPTURE_PUBLISHED = "capture.published"  # machine: the snapshot exists, a hibernating machine still stands there
    CAPTURE_ENDED = "capture.ended"  # the hibernated machine and its live record are gone
    CAPTURE_REPORTED = "capture.reported"  # the node is done, the row not yet
    CAPTURE_COMMITTED = "capture.committed"  # the row is complete, the caller does not know
    REBASE_BEGUN = "rebase.begun"  # a sleeping snapshot is to have a base of its own, nothing of it is written
    REBASE_WRITTEN = "rebase.written"  # the base is durable, no manifest names it
    REBASE_PUBLISHED = "rebase.published"  # the manifest names it, what it needs no more is still there
    MERGE_BEGUN = "merge.begun"  # a sleeping snapshot is to lie on fewer layers, nothing is written
    MERGE_WRITTEN = "merge.written"  # the merged layer is durable, no manifest names it
    MERGE_PUBLISHED = "merge.published"  # the manifest names it, those that it replaces are still there
    REWIND_ASLEEP = "rewind.asleep"  # what it was until now is captured, nothing else has happened
    REWIND_RECORDED = "rewind.recorded"  # the row says waking at the snapshot, what it was is a branch; the node knows nothing
    PROMOTE_ASLEEP = "promote.asleep"  # the branch is captured, its parent not touched
    PROMOTE_PARENT_ASLEEP = "promote.parent-asleep"  # both are captured, nothing else has happened
    PROMOTE_RECORDED = "promote.recorded"  # the branch is gone into its parent's row, which says waking; the node knows nothing
    FORK_CAPTURED = "fork.captured"  # the parent is captured, no child's row
    FORK_RECORDED = "fork.recorded"  # the children's rows say creating, nothing of them is set off
    COMPACT_WRITTEN = "compact.written"  # what is still needed is in a durable segment that nothing names
    COMPACT_INDEXED = "compact.indexed"  # its index (or that of a rebase) is durable too, the manifest names the old one
    COMPACT_REPLACED = "compact.replaced"  # the manifest names the new one, the old files are there
    LAYERS_MERGED = "layers.merged"  # machine: what lay below is in the active layer, the live record names those below
    LAYERS_RECORDED = "layers.recorded"  # machine: the record does not name them any more, their files are there
    UPLOAD_BEGUN = "upload.begun"  # the row says uploading, nothing is sent
    UPLOAD_ANNOUNCED = "upload.announced"  # a pack's row is there, its object is not
    UPLOAD_SENT = "upload.sent"  # the object is there, its row says that it may be
    UPLOAD_DESCRIBED = "upload.described"  # packs and manifest are in the store, the row says uploading
    UPLOAD_COMMITTED = "upload.committed"  # the row says durable, nobody knows
    COLLECT_RELEASED = "collect.released"  # rows say what nobody wants any more, it is all in the store
    COLLECT_CONDEMNED = "collect.condemned"  # rows say which packs go, their objects are there
    COLLECT_DELETED = "collect.deleted"  # the objects are gone, their rows are there
    COLLECT_COPIED = "collect.copied"  # what is alive in worn packs is in a new one, which only the rewriter holds
    COLLECT_REPLACED = "collect.replaced"  # the new pack has taken their place, the rewriter holds it still
    SHRED_ASKED = "shred.asked"  # the row says that a tenant goes, its key and its workspaces are there
    SHRED_KEYLESS = "shred.keyless"  # the key is gone, the workspaces are there
    SHRED_EMPTIED = "shred.emptied"  # they are deleted too, the row does not say so
    FETCH_IMAGE_WRITTEN = "fetch.image-written"  # an image or golden is here, in a directory that is nobody's
    FETCH_IMAGE_PUBLISHED = "fetch.image-published"  # it has its place, the snapshot on it is not here
    FETCH_BEGUN = "fetch.begun"  # nothing of the snapshot is here, or another copy as it was until FETCH_PUBLISHED
    FETCH_LAYERS = "fetch.layers"  # its disk layers are here, nothing names them
    FETCH_WRITTEN = "fetch.written"  # every file is durable but the manifest
    FETCH_PUBLISHED = "fetch.published"  # the snapshot is here, its wake has not begun
    DELETE_RECORDED = "delete.recorded"  # the row says deleted, its machine runs and its snapshots are there
    REAP_MARKED = "reap.marked"  # rows say that snapshots go, their files are all there
    REAP_UNNAMED = "reap.unnamed"  # a manifest is gone, the other files of the snapshot are there
    REAP_FREED = "reap.freed"  # the files are gone, the rows not yet
    SALVAGE_KEPT = "salvage.kept"  # the disk of a lost machine, if it had news, is a snapshot, its row is pending
    SALVAGE_RECORDED = "salvage.recorded"  # it is a branch, the node may still know the lost machine
    BACKUP_BEGUN = "backup.begun"  # the place says that one was begun, nothing is held
    BACKUP_HELD = "backup.held"  # every snapshot of an instant is held by a row, nothing is dumped
    BACKUP_DUMPED = "backup.dumped"  # the instant is dumped, nothing is sent
    BACKUP_IMAGE_SENT = "backup.image-sent"  # an image is in the place
    BACKUP_SNAPSHOT_SENT = "backup.snapshot-sent"  # a snapshot is in the place
    BACKUP_SENT = "backup.sent"  # everything is in the place but the backup's manifest
    BACKUP_FINISHED = "backup.finished"  # the backup exists, its snapshots are still held
    RESTORE_MARKED = "restore.marked"  # the home says that a restore into it was begun, nothing else is in it
    RESTORE_FETCHED = "restore.fetched"  # images and snapshots are here, the database is empty
    RESTORE_LOADED = "restore.loaded"  # the database is as it was at the backup
    RESTORE_SETTLED = "restore.settled"  # every workspace has its new life, the home still says that the restore goes on
    RECOVER_CLAIMED = "recover.claimed"  # the object store is this installation's, the database is empty
    RECOVER_COMMITTED = "recover.committed"  # the catalogue is made, nobody knows
    RUNS_BATCH_GATHERED = "runs.batch-gathered"  # decisions on executions are to be committed together, nothing is written
    RUNS_BATCH_COMMITTED = "runs.batch-committed"  # they are committed, nobody knows
    RUNS_START_COMMITTED = "runs.start-committed"  # an execution is there, whoever started it does not know
    RUNS_CLAIM_COMMITTED = "runs.claim-committed"  # a worker has the lease of an invocation, and does not know
    RUNS_CHECKPOINT_COMMITTED = "runs.checkpoint-committed"  # a checkpoint is recorded, its function does not know
    RUNS_ANSWER_COMMITTED = "runs.answer-committed"  # an invocation is over, its worker does not know
    RUNS_LEASE_OVER = "runs.lease-over"  # a lease was found over, its invocation is in flight
    RUNS_LEASE_TAKEN = "runs.lease-taken"  # the invocation counts as lost, nobody has taken the next one
    RUNS_TIMER_DUE = "runs.timer-due"  # a timer was found due, it has not fired
    RUNS_TIMER_FIRED = "runs.timer-fired"  # it has, nobody knows
    RUNS_CALLBACK_COMPLETED = "runs.callback-completed"  # a callback is completed, whoever did it does not know
    RUNS_CHILD_WANTED = "runs.child-wanted"  # a chained invoke is recorded, its execution is not there
    RUNS_CHILD_STARTED = "runs.child-started"  # its execution is there, nobody knows
    RUNS_PARENT_OWED = "runs.parent-owed"  # a child has ended, its parent has not been told
    RUNS_PARENT_TOLD = "runs.parent-told"  # it has, the child's row says that it has not
    RUNS_STOP_COMMITTED = "runs.stop-committed"  # an execution is stopped, whoever did it does not know
    RUNS_EXPIRED = "runs.expired"  # one was found to have been kept for long enough, it is there
    RUNS_DELETE_COMMITTED = "runs.delete-committed"  # one counts as deleted, all that it was is there
    RUNS_DELETE_FORGOTTEN = "runs.delete-forgotten"  # all that is gone, but for the hashes of its history
    RUNS_HEADS_PUT = "runs.heads-put"  # signed heads of histories are in the store, no row says so
    RUNS_HEADS_SIGNED = "runs.heads-signed"  # it does, nobody knows
    UPGRADE_BEGUN = "upgrade.begun"  # the older database is as it was found, the directory to work in is there
    UPGRADE_SHUT_DOWN = "upgrade.shut-down"  # the older one is shut down in order, nothing of a new one is there
    UPGRADE_MADE = "upgrade.made"  # an empty new one is there
    UPGRADE_COPIED = "upgrade.copied"  # the new one holds everything, the older one is in its place
    UPGRADE_SET_ASIDE = "upgrade.set-aside"  # the older one is set aside, none is in its place
    UPGRADE_SWITCHED = "upgrade.switched"  # the new one is in its place and was never started
    UPGRADE_ANSWERS = "upgrade.answers"  # the new one has started and answers, the older one is kept
    UPGRADE_LET_GO = "upgrade.let-go"  # the older one is nobody's any more, its files are there


class Victim(StrEnum):
    SERVER = "server"
    VMM = "vmm"  # only at points that have a machine


@dataclass(slots=True)
class _Armed:
    path: Path
    line: str = ""
    passes: int = 0


_armed: _Armed | None = None


def arm(path: Path | None) -> None:
    """Look into ``path`` at every point from here on; None: at none."""
    global _armed  # noqa: PLW0603 - one per process, like the process that it kills
    _armed = None if path is None else _Armed(path)


def crashpoint(point: CrashPoint, vmm: int | None = None) -> None:
    """Pass the point, or die at it. ``vmm`` is the machine's process id where there is one."""
    if _armed is not None:
        _pass(_armed, point, vmm)


def _pass(armed: _Armed, point: CrashPoint, vmm: int | None) -> None:
    try:
        line = armed.path.read_text().strip()
    except FileNotFoundError:
        return
    if line != armed.line:
        armed.line, armed.passes = line, 0
    wanted, victim, hit = parse(line)
    if wanted is not point:
        return
    if victim is Victim.VMM and vmm is None:
        raise InvalidRequest(f"There is no machine at the crash point {point.value}.", hint="Kill the server there.")
    armed.passes += 1
    if armed.passes == hit:
        armed.path.unlink()
        armed.line = ""  # the same line written again begins to count again
        _kill(os.getpid() if victim is Victim.SERVER or vmm is None else vmm)


def parse(line: str) -> tuple[CrashPoint, Victim, int]:
    """Raises InvalidRequest for a line that names no point, no victim or no number."""
    try:
        point, victim, hit = line.split()
        return CrashPoint(point), Victim(victim), int(hit)
    except ValueError as error:
        raise InvalidRequest(f"{line!r} is no crash: it must be 'POINT VICTIM HIT'.", internal=str(error)) from error


def _kill(pid: int) -> None:
    """SIGKILL, and wait until it is dead. For this process, nothing after the signal happens."""
    descriptor = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        poll = select.poll()  # select() knows no descriptor above 1023, and a server may have more
        poll.register(descriptor, select.POLLIN)
        poll.poll(DEATH_DEADLINE_S * 1000)
    finally:
        os.close(descriptor)
