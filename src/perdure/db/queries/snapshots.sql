-- name: insert_pending
-- Intent: written before the node is asked to make it. No row when the workspace has moved on.
insert into snapshots (id, tenant_id, workspace_id, origin_id, node_id, state, parent_id, name, reason, generation)
select %(id)s, w.tenant_id, w.id, w.id, %(node_id)s, 'pending', w.head_snapshot_id, %(name)s, %(reason)s, w.generation
from workspaces w
where w.id = %(workspace_id)s and w.generation = %(generation)s and w.state <> 'deleted'
returning id;

-- name: complete
-- What the node made. ``owner_id`` differs from the row's workspace for a salvaged disk that becomes a branch of its own. A parent
-- that the node remembers and that is gone meanwhile gives way to what was the head when this one was begun.
update snapshots
set state = 'complete', workspace_id = coalesce(%(owner_id)s::text, workspace_id), image = %(image)s,
    parent_id = coalesce((select p.id from snapshots p where p.id = %(parent_id)s), parent_id),
    memory_mib = %(memory_mib)s, vcpus = %(vcpus)s, disk_gib = %(disk_gib)s, has_memory = %(has_memory)s, quiesced = %(quiesced)s,
    pages = %(pages)s, memory_bytes = %(memory_bytes)s, memory_total_bytes = %(memory_total_bytes)s, disk_bytes = %(disk_bytes)s,
    disk_total_bytes = %(disk_total_bytes)s, device_bytes = %(device_bytes)s, pause_s = %(pause_s)s,
    fingerprint = %(fingerprint)s, created_at = perdure_now()
where id = %(id)s and state = 'pending'
returning *;

-- name: of_workspace
-- Complete ones, oldest first.
select s.*, i.durable_at as stored_at
from snapshots s left join store_items i on i.scope = s.tenant_id and i.name = s.id and i.state = 'durable'
where s.workspace_id = %(workspace_id)s and s.state = 'complete' order by s.created_at, s.id;

-- name: by_ref
-- One that a workspace may start or fork from, by id or name: its own, or the one it was forked from.
select s.*, i.durable_at as stored_at
from snapshots s left join store_items i on i.scope = s.tenant_id and i.name = s.id and i.state = 'durable'
where s.state = 'complete' and s.tenant_id = %(tenant_id)s
  and ((s.workspace_id = %(workspace_id)s and (s.id = %(ref)s or s.name = %(ref)s))
       or (s.id = %(ref)s and exists (select 1 from workspaces w where w.id = %(workspace_id)s
                                      and (w.head_snapshot_id = s.id or w.forked_from = s.id))));

-- name: on_node
-- Every row of a node, for the reconciler.
select id, tenant_id, workspace_id, state, reason, name, generation, created_at from snapshots
where node_id = %(node_id)s order by created_at, id;

-- name: unfinished
-- Pending ones of a workspace on its node.
select s.id, s.reason, s.name, s.generation from snapshots s
where s.workspace_id = %(workspace_id)s and s.state = 'pending'
  and s.node_id = (select w.node_id from workspaces w where w.id = s.workspace_id)
order by s.created_at, s.id;

-- name: deleting
-- What the node must still delete.
select id from snapshots where node_id = %(node_id)s and state = 'deleting' order by created_at, id limit 500;

-- name: hold
-- Inside a transaction that is about to make it a head: nobody can mark it before that commits. No row when it is gone.
select id from snapshots where id = %(id)s and state = 'complete' for update;

-- name: adopt
-- The snapshots of a promoted branch are its parent's from here on. A name that the parent has given away already is dropped.
update snapshots s
set workspace_id = %(to)s,
    name = case when exists (select 1 from snapshots o where o.workspace_id = %(to)s and o.name = s.name and o.state <> 'deleting')
                then null else s.name end
where s.workspace_id = %(workspace_id)s and s.state <> 'deleting'
returning s.id;

-- name: ancestors
-- What a snapshot descends from, in this workspace or in the one it was forked from, closest first.
with recursive way as (
    select s.id, s.parent_id, 0 as distance from snapshots s where s.id = %(id)s and s.tenant_id = %(tenant_id)s
    union all
    select p.id, p.parent_id, way.distance + 1 from snapshots p join way on p.id = way.parent_id where way.distance < 100000
)
select s.* from way join snapshots s on s.id = way.id
where way.distance > 0 and s.state = 'complete' and s.tenant_id = %(tenant_id)s order by way.distance;
