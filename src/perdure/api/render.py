"""Service values to public models. Pure."""

from __future__ import annotations

import base64
from dataclasses import asdict
from typing import Any

from perdure.access.audit import AuditRow
from perdure.access.limits import GIB, Limits, Use
from perdure.access.model import Key, Tenant
from perdure.api.errors import error_info
from perdure.core.errors import PerdureError
from perdure.core.ids import TenantId
from perdure.core.scopes import KeyScope
from perdure.journal.feed import FeedEvent
from perdure.metering.usage import Amounts, Usage, total
from perdure.webhooks.model import Delivery, Webhook
from perdure.wire import node, public
from perdure.workspaces import longsleep, model


def text(value: str) -> str:
    """A guest's bytes as text that can be encoded: what is not UTF-8 becomes U+FFFD."""
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def confinement(value: node.Confinement) -> public.ConfinementInfo:
    return public.ConfinementInfo(
        isolation=value.isolation,
        jail=value.jail,
        seccomp=value.seccomp,
        own_user=value.own_user,
        memory_limit=value.memory_limit,
        cpu_limit=value.cpu_limit,
        pids_limit=value.pids_limit,
        readonly_base=value.readonly_base,
        missing=dict(value.missing),
    )


def workspace(value: model.Workspace) -> public.WorkspaceInfo:
    held, coming = value.confinement, value.fetching
    return public.WorkspaceInfo(
        id=value.id,
        name=value.name,
        kind=public.WorkspaceKind(value.kind.value),
        state=public.WorkspaceState(value.state.value),
        state_detail=value.state_detail,
        generation=value.generation,
        isolation=held.isolation if held else None,
        image=value.image,
        image_name=value.image_name,
        memory_mib=value.size.memory_mib,
        vcpus=value.size.vcpus,
        disk_gib=value.disk_gib,
        head_snapshot_id=value.head_snapshot_id,
        parent_id=value.parent_id,
        forked_from=value.forked_from,
        hostname=value.hostname,
        idle_timeout_s=value.idle_timeout_s,
        checkpoint_interval_s=value.checkpoint_interval_s,
        egress_allow=list(value.egress_allow),
        environment=dict(value.environment),
        metadata=dict(value.metadata),
        confinement=confinement(held) if held else None,
        keep_awake_until=value.keep_awake_until,
        created_at=value.created_at,
        state_changed_at=value.state_changed_at,
        last_active_at=value.last_active_at,
        expires_at=value.expires_at,
        keep_snapshots=value.keep_snapshots,
        fetching=public.FetchInfo(read_bytes=coming.read_bytes, total_bytes=coming.total_bytes) if coming else None,
        idle=None if value.idleness is None else idleness(value.idleness),
        wake_at=value.wake_at,
        asleep_after_days=value.asleep_after_days,
        asleep_action=value.asleep_action.value,
        archived_at=longsleep.archived_at(value),
        deletes_at=longsleep.deletes_at(value),
    )


def idleness(value: model.Idleness) -> public.IdleInfo:
    reasons = [public.AwakeReason(use=one.use.value, count=one.count, left_s=one.left_s) for one in value.reasons]
    return public.IdleInfo(unused_s=value.unused_s, reasons=reasons, sleeps_in_s=value.sleeps_in_s)


def resume_report(value: model.ResumeReport) -> public.ResumeReport:
    return public.ResumeReport(
        workspace_id=value.workspace_id,
        generation=value.generation,
        snapshot_id=value.snapshot_id,
        memory=value.memory,
        memory_reason=value.memory_reason,
        disk=value.disk.value,
        asleep_s=value.asleep_s,
        clock_step_s=value.clock_step_s,
        connections_dropped=value.connections_dropped,
        execs_running=list(value.execs_running),
        execs_lost=list(value.execs_lost),
        lost_branch=value.lost_branch,
        isolation=value.confinement.isolation,
        confinement=confinement(value.confinement),
        pooled=value.pooled,
        timings_ms=dict(value.timings_ms),
        at=value.at,
        problems=list(value.problems),
        kept_branch=value.kept_branch,
        restored_from=value.restored_from,
        fetched_bytes=value.fetched_bytes,
        wake_at=value.wake_at,
        late_s=value.late_s,
        hooks=[_hook(hook) for hook in value.hooks],
    )


def _hook(value: node.HookRun) -> public.HookInfo:
    return public.HookInfo(
        name=value.name,
        outcome=value.outcome.value,
        exit_code=value.exit_code,
        seconds=value.seconds,
        output=value.output,
    )


def snapshot(value: model.Snapshot) -> public.SnapshotInfo:
    return public.SnapshotInfo(
        id=value.id,
        workspace_id=value.workspace_id,
        parent_id=value.parent_id,
        name=value.name,
        reason=value.reason.value,
        generation=value.generation,
        has_memory=value.has_memory,
        quiesced=value.quiesced,
        memory_bytes=value.memory_bytes,
        memory_total_bytes=value.memory_total_bytes,
        disk_bytes=value.disk_bytes,
        disk_total_bytes=value.disk_total_bytes,
        pause_s=value.pause_s,
        created_at=value.created_at,
        disk_gib=value.disk_gib,
        durable="local" if value.stored_at is None else "store",
        upload=None if value.upload is None else _upload(value.upload),
    )


def _upload(value: model.Upload) -> public.UploadInfo:
    return public.UploadInfo(
        state=public.UploadState(value.state.value),
        read_bytes=value.read_bytes,
        sent_bytes=value.sent_bytes,
        total_bytes=value.total_bytes,
        error=value.error,
        retry_s=value.retry_s,
    )


def tree(value: list[model.TreeNode]) -> public.WorkspaceTree:
    nodes = [
        public.TreeNode(
            workspace=workspace(node.workspace),
            depth=node.depth,
            forked_name=node.forked_name,
            forked_at=node.forked_at,
            own_bytes=node.own_bytes,
            total_bytes=node.total_bytes,
        )
        for node in value
    ]
    return public.WorkspaceTree(nodes=nodes)


def place(value: model.SnapshotPlace) -> public.SnapshotPlace:
    sizes = value.sizes
    return public.SnapshotPlace(
        **snapshot(value.snapshot).model_dump(),
        is_head=value.is_head,
        kept=[kept.value for kept in value.kept],
        branches=list(value.branches),
        references=list(value.references),
        own_bytes=sizes.own_bytes if sizes else None,
        shared_bytes=sizes.shared_bytes if sizes else None,
        total_bytes=sizes.total_bytes if sizes else None,
    )


def fork_result(value: model.Workspace | PerdureError) -> public.ForkResult:
    if isinstance(value, PerdureError):
        return public.ForkResult(error=error_info(value))
    return public.ForkResult(workspace=workspace(value))


def verifying(value: model.Verifying) -> public.VerifyEvent:
    return public.VerifyEvent(
        type="progress",
        workspace=value.workspace.name,
        snapshot_id=value.snapshot.id,
        file=value.file,
        read_bytes=value.read_bytes,
        done=value.done,
        count=value.count,
    )


def verified(value: model.Verified) -> public.VerifiedSnapshot:
    trial, info = value.trial, snapshot(value.snapshot)
    return public.VerifiedSnapshot(
        workspace=value.workspace.name,
        workspace_id=value.workspace.id,
        snapshot_id=value.snapshot.id,
        name=value.snapshot.name,
        intact=value.intact,
        damage=[public.DamageInfo(file=one.file, problem=one.problem) for one in value.damage],
        disk_intact=value.disk_intact,
        ancestor=value.ancestor,
        trial=None
        if trial is None
        else public.TrialInfo(kind=trial.kind.value, reason=trial.reason, seconds=trial.seconds, problem=trial.problem),
        read_from=value.read_from,
        durable=info.durable,
        upload=info.upload,
    )


def log_entry(value: model.JournalEntry) -> public.LogEntry:
    return public.LogEntry(
        seq=value.seq, at=value.at, kind=value.kind, generation=value.generation, body=dict(value.body), hash=value.hash
    )


def feed_event(value: FeedEvent) -> public.FeedEvent:
    return public.FeedEvent(
        seq=value.seq,
        at=value.at,
        kind=value.kind,
        workspace_id=value.workspace_id,
        workspace=value.workspace,
        entry_seq=value.entry_seq,
        generation=value.generation,
        body=dict(value.body),
    )


def webhook(value: Webhook) -> public.WebhookInfo:
    return public.WebhookInfo(
        id=value.id,
        url=value.url,
        events=list(value.kinds),
        state=value.state.value,
        created_at=value.created_at,
        created_by=value.created_by,
        pending=value.pending,
        failed=value.failed,
        delivered=value.delivered,
        delivered_at=value.delivered_at,
        failed_at=value.failed_at,
        last_error=value.last_error,
    )


def delivery(value: Delivery) -> public.DeliveryInfo:
    return public.DeliveryInfo(
        seq=value.seq,
        at=value.at,
        kind=value.kind,
        workspace_id=value.workspace_id,
        workspace=value.workspace,
        state=value.state.value,
        attempts=value.attempts,
        due_at=value.due_at,
        last_error=value.last_error,
    )


def outcome(value: node.ExecExited) -> public.ExecOutcome:
    return public.ExecOutcome(
        exec_id=value.exec_id,
        end=value.end,
        exit_code=value.exit_code,
        signal=value.signal,
        detail=text(value.detail),
        run_s=value.run_s,
    )


def exec_info(value: node.ExecInfo, generation: int) -> public.ExecInfo:
    return public.ExecInfo(
        exec_id=value.exec_id,
        pid=value.pid,
        command=text(value.command),
        started_at=value.started_at,
        outcome=outcome(value.exited) if value.exited else None,
        stdout_bytes=value.stdout_bytes,
        stderr_bytes=value.stderr_bytes,
        generation=generation,
        pty=public.PtyInfo(rows=value.pty.rows, cols=value.pty.cols) if value.pty else None,
    )


def exec_event(value: node.ExecEvent) -> public.ExecEvent:
    if isinstance(value, node.ExecStarted):
        return public.ExecEvent(type="started", exec_id=value.exec_id, pid=value.pid)
    if isinstance(value, node.ExecOutput):
        data = base64.b64encode(value.data).decode()
        return public.ExecEvent(type="output", stream=value.stream, offset=value.offset, data=data, gap=value.gap)
    return public.ExecEvent(type="exited", exec_id=value.exec_id, outcome=outcome(value))


def program(value: node.ProgramStatus, generation: int, ping: node.ProgramPing | None = None) -> public.ProgramInfo:
    spec, last = value.spec, value.last
    return public.ProgramInfo(
        program=None if spec is None else _program_spec(spec),
        state=value.state,
        pid=value.pid,
        started_at=value.started_at,
        restarts=value.restarts,
        failures=value.failures,
        retry_in_s=value.retry_in_s,
        last=None
        if last is None
        else public.ProgramEndInfo(exit_code=last.exit_code, signal=last.signal, detail=text(last.detail), run_s=last.run_s),
        problem=text(value.problem),
        log_start=value.log_start,
        log_end=value.log_end,
        ping=None if ping is None else ping.status,
        generation=generation,
    )


def _program_spec(value: node.ProgramSpec) -> public.ProgramSpecInfo:
    return public.ProgramSpecInfo(
        argv=[text(word) for word in value.argv],
        env={text(name): text(content) for name, content in value.env.items()},
        cwd=None if value.cwd is None else text(value.cwd),
        user=None if value.user is None else text(value.user),
        port=value.port,
        restart=value.restart,
        stop_grace_s=value.stop_grace_s,
    )


def log_chunk(value: node.LogChunk) -> public.LogChunk:
    return public.LogChunk(type="output", offset=value.offset, data=base64.b64encode(value.data).decode(), gap=value.gap)


def _raw(path: str) -> str | None:
    """base64 of a path's bytes, if they are not UTF-8."""
    raw = path.encode("utf-8", "surrogateescape")
    return None if text(path).encode() == raw else base64.b64encode(raw).decode()


def file_info(value: node.FileInfo) -> public.FileInfo:
    return public.FileInfo(
        path=text(value.path),
        name=text(value.name),
        kind=value.kind,
        size=value.size,
        mode=value.mode,
        uid=value.uid,
        gid=value.gid,
        modified_at=value.modified_at,
        target=None if value.target is None else text(value.target),
        raw_path=_raw(value.path),
        revision=value.revision,
    )


def watch_event(value: node.WatchEvent) -> public.WatchEvent:
    told: dict[str, Any] = {"type": value.kind.value, "seq": value.seq, "path": text(value.path), "directory": value.is_directory}
    if value.kind is node.WatchKind.ENDED:
        told["reason"] = "gone"
    if value.old_path is not None:
        told |= {"old_path": text(value.old_path), "raw_old_path": _raw(value.old_path)}
    return public.WatchEvent(**told, raw_path=_raw(value.path))


def usage_rows(tenant_id: TenantId, found: list[Usage], by: public.UsageBy) -> list[public.UsageRow]:
    """One of each workspace, or one of all of a tenant together."""
    if by == "tenant":
        return [_usage_row(tenant_id, None, total(one.amounts for one in found))]
    return [_usage_row(tenant_id, one, one.amounts) for one in found]


def _usage_row(tenant_id: TenantId, of: Usage | None, amounts: Amounts) -> public.UsageRow:
    values = asdict(amounts)
    times = {f"{phase}_s": values.pop(phase).total_seconds() for phase in ("awake", "paused", "asleep")}
    whose = {"workspace_id": of.workspace_id, "name": of.name, "state": of.state} if of else {}
    return public.UsageRow(tenant_id=tenant_id, **{"workspace_id": None, "name": None, "state": None, **whose}, **times, **values)


def meters(value: model.Metered) -> public.Meters:
    reading = value.reading
    return public.Meters(
        workspace_id=value.workspace.id,
        name=value.workspace.name,
        generation=value.workspace.generation,
        cpu_s=reading.cpu_s,
        sent_bytes=reading.sent_bytes,
        received_bytes=reading.received_bytes,
    )


def key(value: Key) -> public.KeyInfo:
    return public.KeyInfo(
        id=value.id,
        tenant_id=value.tenant_id,
        name=value.name,
        prefix=value.prefix,
        scopes=[scope for scope in KeyScope if scope in value.scopes],
        state=value.state,
        created_at=value.created_at,
        created_by=value.created_by,
        expires_at=value.expires_at,
        last_used_at=value.last_used_at,
        revoked_at=value.revoked_at,
        revoked_by=value.revoked_by,
    )


def quota(tenant_id: TenantId, name: str | None, limits: Limits, use: Use, execs: int) -> public.QuotaInfo:
    """What a tenant may have, and has; ``execs`` run now."""
    used = public.QuotaUse(
        workspaces=use.workspaces,
        memory_awake_mib=use.memory_awake_mib,
        storage_gib=round(use.storage_bytes / GIB, 6),
        execs=execs,
    )
    limited = public.QuotaLimits(**asdict(limits))
    return public.QuotaInfo(tenant_id=tenant_id, name=name, limits=limited, used=used, awake=list(use.awake))


def audit_row(value: AuditRow) -> public.AuditRow:
    told = {name: fact for name, fact in asdict(value.act).items() if name != "note"}
    return public.AuditRow(seq=value.seq, at=value.at, repeated=value.repeated, **told)


def tenant(value: Tenant) -> public.TenantInfo:
    return public.TenantInfo(id=value.id, name=value.name, created_at=value.created_at, created_by=value.created_by)
