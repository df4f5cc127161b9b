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
        'asleep_after_days', w.asleep_after_days, 'asleep_action', w.asleep_action,
        'egress_allow', to_jsonb(w.egress_allow), 'environment', w.environment, 'metadata', w.metadata,
        'wake_at', w.wake_at, 'created_at', w.created_at, 'expires_at', w.expires_at),
    'snapshot', jsonb_build_object(
        'workspace_id', s.workspace_id, 'origin_id', s.origin_id, 'parent_id', s.parent_id, 'name', s.name, 'reason', s.reason,
        'generation', s.generation, 'created_at', s.created_at),
    'at', perdure_now()) as facts
from snapshots s join workspaces w on w.id = s.workspace_id
where s.id = %(id)s;

-- name: is_empty
-- Whether a catalogue could be made here without mixing with another.
select not exists (select 1 from workspaces) and not exists (select 1 from snapshots) and not exists (select 1 from store_items)
       as is_empty;

-- name: installation
select id from installation;

-- name: add_workspace
-- One of which the database knew everything is made of its facts; of others the caller says what it can. The parent is set when all
-- are there.
insert into workspaces (id, tenant_id, name, kind, state, state_detail, generation, node_id, image, image_name, memory_mib, vcpus,
                        disk_gib, head_snapshot_id, forked_from, hostname, machine_id, idle_timeout_s, checkpoint_interval_s,
                        keep_snapshots, asleep_after_days, asleep_action, egress_allow, environment, metadata, created_at,
                        expires_at, wake_at, rewound)
values (%(id)s, %(tenant_id)s, %(name)s, %(kind)s, 'hibernated', %(detail)s,
        greatest(%(generation)s + 1, floor(extract(epoch from perdure_now()))::bigint), %(node_id)s, %(image)s, %(image_name)s,
        %(memory_mib)s, %(vcpus)s, %(disk_gib)s, %(head_snapshot_id)s, %(forked_from)s, %(hostname)s, %(machine_id)s,
        %(idle_timeout_s)s, %(checkpoint_interval_s)s, %(keep_snapshots)s, %(asleep_after_days)s, %(asleep_action)s,
        %(egress_allow)s, %(environment)s, %(metadata)s, %(created_at)s, %(expires_at)s,
        %(wake_at)s, %(rewound)s)
returning journal_append(tenant_id, id, 'recovered', generation, %(body)s) as seq;

-- name: set_parent
update workspaces set parent_id = %(parent_id)s where id = %(id)s;

-- name: add_snapshot
insert into snapshots (id, tenant_id, workspace_id, origin_id, node_id, state, parent_id, name, reason, generation, image, memory_mib,
                       vcpus, disk_gib, has_memory, quiesced, pages, memory_bytes, memory_total_bytes, disk_bytes, disk_total_bytes,
                       device_bytes, pause_s, fingerprint, created_at)
values (%(id)s, %(tenant_id)s, %(workspace_id)s, %(origin_id)s, %(node_id)s, 'complete', %(parent_id)s, %(name)s, %(reason)s,
        %(generation)s, %(image)s, %(memory_mib)s, %(vcpus)s, %(disk_gib)s, %(has_memory)s, %(quiesced)s, %(pages)s, %(memory_bytes)s,
        %(memory_total_bytes)s, %(disk_bytes)s, %(disk_total_bytes)s, %(device_bytes)s, %(pause_s)s, %(fingerprint)s, %(created_at)s);

-- name: add_scope
insert into store_scopes (scope, tenant_id, attempts) values (%(scope)s, %(tenant_id)s, %(attempts)s)
on conflict (scope) do update set attempts = greatest(store_scopes.attempts, excluded.attempts);

-- name: keep_scope
-- Nothing of it is collected for so long.
insert into store_scopes (scope, tenant_id, collect_after)
values (%(scope)s, %(tenant_id)s, perdure_now() + make_interval(secs => %(keep_s)s))
on conflict (scope) do update set collect_after = excluded.collect_after
returning collect_after;

-- name: add_item
insert into store_items (scope, name, tenant_id, state, generation, size, checksum, heard_epoch, durable_at)
values (%(scope)s, %(name)s, %(tenant_id)s, 'durable', %(attempt)s, %(size)s, %(checksum)s, 0, perdure_now());

-- name: add_need
insert into store_needs (scope, name, need_scope, need_name, tenant_id)
values (%(scope)s, %(name)s, %(need_scope)s, %(need_name)s, %(tenant_id)s);

-- name: add_pack
insert into store_packs (id, scope, tenant_id, state, generation, whole, size, index_bytes)
values (%(id)s, %(scope)s, %(tenant_id)s, 'stored', 0, true, %(size)s, %(index_bytes)s);

-- name: add_hold
insert into store_holds (scope, name, pack_id, tenant_id) values (%(scope)s, %(name)s, %(pack_id)s, %(tenant_id)s);
