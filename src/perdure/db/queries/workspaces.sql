-- name: insert
-- A new workspace and the first entry of its thread. Whoever removes its image sees it, or is through with that before it is there.
insert into workspaces (id, tenant_id, name, kind, state, generation, node_id, image, image_name, memory_mib, vcpus, disk_gib,
                        head_snapshot_id, parent_id, forked_from, hostname, machine_id, idle_timeout_s, checkpoint_interval_s,
                        keep_snapshots, asleep_after_days, asleep_action, egress_allow, environment, metadata, request_key,
                        expires_at, state_detail)
values (%(id)s, %(tenant_id)s, %(name)s, %(kind)s, %(state)s, 1, %(node_id)s, %(image)s, %(image_name)s, %(memory_mib)s,
        %(vcpus)s, %(disk_gib)s, %(head_snapshot_id)s, %(parent_id)s, %(forked_from)s, %(hostname)s, %(machine_id)s,
        %(idle_timeout_s)s, %(checkpoint_interval_s)s, %(keep_snapshots)s, %(asleep_after_days)s, %(asleep_action)s,
        %(egress_allow)s, %(environment)s, %(metadata)s, %(request_key)s,
        perdure_now() + make_interval(secs => %(expires_s)s::double precision), %(detail)s)
returning *, perdure_now() as now, null::boolean as head_has_memory, null::int as head_disk_gib,
          null::text as head_origin_id, null::boolean as head_quiesced,
          journal_append(tenant_id, id, %(entry_kind)s, generation, %(body)s) as seq,
          pg_advisory_xact_lock_shared(hashtextextended('image ' || image, 0)) as image_lock;

-- name: by_id
-- Deleted ones included: the caller looks at the state.
select w.*, perdure_now() as now, h.has_memory as head_has_memory, h.disk_gib as head_disk_gib, h.origin_id as head_origin_id,
       h.quiesced as head_quiesced
from workspaces w left join snapshots h on h.id = w.head_snapshot_id
where w.id = %(id)s;

-- name: by_ref
-- By id or by the name of one that is not deleted, within a tenant.
select w.*, perdure_now() as now, h.has_memory as head_has_memory, h.disk_gib as head_disk_gib, h.origin_id as head_origin_id,
       h.quiesced as head_quiesced
from workspaces w left join snapshots h on h.id = w.head_snapshot_id
where w.tenant_id = %(tenant_id)s and (w.id = %(ref)s or (w.name = %(ref)s and w.state <> 'deleted'));

-- name: by_request
-- The one that a request of this key has made, unless it is deleted.
select w.*, perdure_now() as now, h.has_memory as head_has_memory, h.disk_gib as head_disk_gib, h.origin_id as head_origin_id,
       h.quiesced as head_quiesced
from workspaces w left join snapshots h on h.id = w.head_snapshot_id
where w.tenant_id = %(tenant_id)s and w.request_key = %(request_key)s and w.state <> 'deleted';

-- name: find
-- A tenant's workspaces, newest last, from behind a place (null: from the first); an empty list of states means all but deleted.
select w.*, perdure_now() as now, h.has_memory as head_has_memory, h.disk_gib as head_disk_gib, h.origin_id as head_origin_id,
       h.quiesced as head_quiesced
from workspaces w left join snapshots h on h.id = w.head_snapshot_id
where w.tenant_id = %(tenant_id)s
  and w.state <> 'deleted'
  and (cardinality(%(states)s::text[]) = 0 or w.state = any(%(states)s::text[]))
  and w.metadata @> %(metadata)s
  and (%(image)s::text is null or w.image_name = %(image)s or w.image = %(image)s)
  and (%(name_prefix)s::text is null or starts_with(w.name, %(name_prefix)s))
  and (w.created_at, w.id) > (coalesce(%(after_at)s::timestamptz, '-infinity'), coalesce(%(after_id)s::text, ''))
order by w.created_at, w.id
limit %(limit)s;

-- name: names_like
-- Names in use that begin with a prefix, to number new ones.
select name from workspaces where tenant_id = %(tenant_id)s and state <> 'deleted' and starts_with(name, %(prefix)s);

-- name: lock_image
-- Until the end of the transaction no workspace of the image is inserted. It ends with the connection of whoever has it.
select pg_advisory_xact_lock(hashtextextended('image ' || %(image)s, 0));

-- name: names_using_image
-- Every tenant's: an image is the node's. A branch of a deleted workspace still lies on it, and so does a snapshot that outlives
-- the workspace that took it.
select name from workspaces where image = %(image)s and state <> 'deleted'
union
select 'snapshot ' || s.id from snapshots s
where s.image = %(image)s
  and not exists (select 1 from workspaces w where w.id = s.workspace_id and w.image = s.image and w.state <> 'deleted')
order by name;

-- name: standing
-- What a reconciler looks at: everything of a node that is not deleted.
select w.id, w.state, w.generation, w.head_snapshot_id,
       exists (select 1 from snapshots s where s.workspace_id = w.id and s.node_id = w.node_id and s.state = 'pending') as has_unfinished,
       exists (select 1 from store_items i
               where i.scope = w.tenant_id and i.name = w.head_snapshot_id and i.state = 'durable') as is_stored
from workspaces w
where w.node_id = %(node_id)s and w.state <> 'deleted'
order by w.id;

-- name: expired
-- Lost branches past their time that nobody is using.
select id, tenant_id from workspaces
where node_id = %(node_id)s and expires_at <= perdure_now() and state in ('hibernated', 'failed');

-- name: move
-- One transition: refused (no row) when state or generation is no longer what it was decided on. The journal entry is part of
-- the statement. null keeps a column as it is.
update workspaces
set state = %(to)s,
    state_detail = %(detail)s,
    generation = generation + %(grow)s,
    state_changed_at = case when state = %(to)s then state_changed_at else perdure_now() end,
    head_snapshot_id = coalesce(%(head)s::text, head_snapshot_id),
    lost_branch = nullif(coalesce(%(lost_branch)s::text, lost_branch), ''),
    kept_branch = nullif(concat_ws(', ', kept_branch, %(kept_branch)s::text), ''),
    rewound = coalesce(%(rewound)s::text, rewound),
    wake_at = case when %(to)s = 'deleted' then null else wake_at end,
    last_active_at = greatest(last_active_at, perdure_now() - make_interval(secs => %(unused_s)s::double precision))
where id = %(id)s and generation = %(generation)s and state = %(from)s
returning *, perdure_now() as now,
          (select h.has_memory from snapshots h where h.id = head_snapshot_id) as head_has_memory,
          (select h.disk_gib from snapshots h where h.id = head_snapshot_id) as head_disk_gib,
          (select h.origin_id from snapshots h where h.id = head_snapshot_id) as head_origin_id,
          (select h.quiesced from snapshots h where h.id = head_snapshot_id) as head_quiesced,
          journal_append(tenant_id, id, %(kind)s, generation, %(body)s) as seq;

-- name: started
-- creating or waking -> running, with the wake's report. What the report told is not told again, and the time to wake at that it
-- was told of has been met.
update workspaces
set state = 'running',
    state_detail = '',
    state_changed_at = perdure_now(),
    last_active_at = perdure_now(),
    confinement = %(confinement)s,
    last_report = %(report)s,
    lost_branch = null,
    kept_branch = null,
    rewound = '',
    wake_at = case when wake_at = %(alarm)s::timestamptz then null else wake_at end
where id = %(id)s and generation = %(generation)s and state = %(from)s
returning *, perdure_now() as now,
          (select h.has_memory from snapshots h where h.id = head_snapshot_id) as head_has_memory,
          (select h.disk_gib from snapshots h where h.id = head_snapshot_id) as head_disk_gib,
          (select h.origin_id from snapshots h where h.id = head_snapshot_id) as head_origin_id,
          (select h.quiesced from snapshots h where h.id = head_snapshot_id) as head_quiesced,
          journal_append(tenant_id, id, 'running', generation, %(body)s) as seq;

-- name: set_detail
-- Say something about a state without changing it.
update workspaces set state_detail = %(detail)s
where id = %(id)s and generation = %(generation)s and state = %(state)s
returning journal_append(tenant_id, id, 'detail', generation, %(body)s) as seq;

-- name: asleep_since
-- When a workspace stopped being awake, or began asleep: the last entry of its thread that leads there. What a wake that failed
-- leaves leads out of waking, and is passed over.
select at from journal
where workspace_id = %(id)s
  and (kind in ('restored', 'recovered')
       or (body->>'to' in ('hibernated', 'failed', 'waking') and coalesce(body->>'from', '') in ('', 'running', 'hibernating')))
order by seq desc
limit 1;

-- name: resize
-- The wanted size of the disk: grows only.
update workspaces set disk_gib = %(disk_gib)s
where id = %(id)s and state <> 'deleted' and disk_gib <= %(disk_gib)s
returning *, perdure_now() as now,
          (select h.has_memory from snapshots h where h.id = head_snapshot_id) as head_has_memory,
          (select h.disk_gib from snapshots h where h.id = head_snapshot_id) as head_disk_gib,
          (select h.origin_id from snapshots h where h.id = head_snapshot_id) as head_origin_id,
          (select h.quiesced from snapshots h where h.id = head_snapshot_id) as head_quiesced,
          journal_append(tenant_id, id, 'resized', generation, %(body)s) as seq;

-- name: keep_awake
-- Until when no idle timer may hibernate it; zero seconds ends an earlier one.
update workspaces set keep_awake_until = perdure_now() + make_interval(secs => %(seconds)s), last_active_at = perdure_now()
where id = %(id)s and state <> 'deleted'
returning *, perdure_now() as now,
          (select h.has_memory from snapshots h where h.id = head_snapshot_id) as head_has_memory,
          (select h.disk_gib from snapshots h where h.id = head_snapshot_id) as head_disk_gib,
          (select h.origin_id from snapshots h where h.id = head_snapshot_id) as head_origin_id,
          (select h.quiesced from snapshots h where h.id = head_snapshot_id) as head_quiesced,
          journal_append(tenant_id, id, 'keep-awake', generation, %(body)s) as seq;

-- name: reparent
-- The branches of one that has been promoted hang on the one that it was promoted into.
update workspaces set parent_id = %(to)s where parent_id = %(parent)s and state <> 'deleted' and id <> %(to)s;

-- name: tree
-- The whole tree that a workspace belongs to, deleted ones included: parents first, siblings in the order of their birth.
with recursive up as (
    select id, parent_id, 0 as height from workspaces where id = %(id)s and tenant_id = %(tenant_id)s
    union all
    select p.id, p.parent_id, up.height + 1 from workspaces p join up on p.id = up.parent_id where p.tenant_id = %(tenant_id)s
), down as (
    select w.id, 0 as depth, array[(w.created_at, w.id)] as way
    from workspaces w where w.id = (select id from up order by height desc limit 1)
    union all
    select w.id, down.depth + 1, down.way || (w.created_at, w.id)
    from workspaces w join down on w.parent_id = down.id where w.tenant_id = %(tenant_id)s
)
select w.*, perdure_now() as now, h.has_memory as head_has_memory, h.disk_gib as head_disk_gib, h.origin_id as head_origin_id,
       h.quiesced as head_quiesced, down.depth, f.name as forked_name, f.created_at as forked_at,
       coalesce(h.memory_total_bytes + h.disk_total_bytes, 0) as total_bytes,
       (select coalesce(sum(s.memory_bytes + s.disk_bytes), 0)::bigint from snapshots s
        where s.workspace_id = w.id and s.state = 'complete') as own_bytes
from down join workspaces w on w.id = down.id
left join snapshots h on h.id = w.head_snapshot_id
left join snapshots f on f.id = w.forked_from and f.state = 'complete'
order by down.way;
