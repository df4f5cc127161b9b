-- name: facts
-- What only the database knows of a snapshot and of its workspace: enough to make their rows again. Grows compatibly: whoever reads
-- it takes what is there.
select jsonb_build_object(
    'workspace', jsonb_build_object(
        'id', w.id, 'tenant_id', w.tenant_id, 'name', w.name, 'kind', w.kind, 'state', w.state, 'generation', w.generation,
        'image', w.image, 'image_name', w.image_name, 'memory_mib', w.memory_mib, 'vcpus', w.vcpus, 'disk_gib', w.disk_gib,
        'head_snapshot_id', w.head_snapshot_id, 'parent_id', w.parent_id, 'forked_from', w.forked_from,
        'hostname', w.hostname, 'machine_id', w.machine_id, 'idle_timeout_s', w.idle_timeout_s,
        'checkpoint_interval_s', w.checkpoint_interval_s, 'keep_snapshots', w.keep_snapshots,
        'egress_allow', to_jsonb(w.egress_allow), 'environment', w.environment, 'metadata', w.metadata,
        'created_at', w.created_at, 'expires_at', w.expires_at),
    'snapshot', jsonb_build_object(
        'workspace_id', s.workspace_id, 'origin_id', s.origin_id, 'parent_id', s.parent_id, 'name', s.name, 'reason', s.reason,
        'generation', s.generation, 'created_at', s.created_at),
    'at', perdure_now()) as facts
from snapshots s join workspaces w on w.id = s.workspace_id
where s.id = %(id)s;
