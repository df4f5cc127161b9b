-- name: installation
-- Whose object store it is.
select id from installation;

-- name: lock_wanted
-- A snapshot that is being uploaded: while this lock is held nobody can mark it.
select id from snapshots where id = %(id)s and state = 'complete' for share;

-- name: unstored
-- What a node has to upload: heads of what sleeps first, then by age. One that cannot be uploaded at present is left out.
select s.id, s.tenant_id, s.workspace_id, s.memory_total_bytes + s.disk_total_bytes + s.device_bytes as total_bytes
from snapshots s
where s.node_id = %(node_id)s and s.state = 'complete' and not s.id = any(%(skip)s::text[])
  and not exists (select 1 from store_items i where i.scope = s.tenant_id and i.name = s.id and i.state <> 'uploading')
order by exists (select 1 from workspaces w where w.head_snapshot_id = s.id and w.state = 'hibernated') desc, s.created_at, s.id
limit %(limit)s;

-- name: is_stored
-- When a snapshot became durable in the store; no row when it is not.
select durable_at from store_items where scope = %(scope)s and name = %(name)s and state = 'durable';

-- name: any_stored
-- Whether a tenant has anything in the store.
select 1 as yes from store_items where scope <> %(images)s and state = 'durable' limit 1;

-- name: is_complete
select id from snapshots where id = %(id)s and state = 'complete';

-- name: tenant_of
select tenant_id from snapshots where id = %(id)s;

-- name: stored
-- Which of these are.
select i.name from store_items i join snapshots s on s.id = i.name and s.tenant_id = i.scope
where i.name = any(%(ids)s) and i.state = 'durable';

-- name: evictable
-- What need not stay on a node: it is in the store, and no workspace that is awake, or about to be, stands on it. ``here`` is what
-- the node has.
select s.id, s.workspace_id from snapshots s
join store_items i on i.scope = s.tenant_id and i.name = s.id and i.state = 'durable'
where s.node_id = %(node_id)s and s.state = 'complete' and s.id = any(%(here)s)
  and not exists (select 1 from workspaces w
                  where (w.id = s.workspace_id or w.head_snapshot_id = s.id) and w.state not in ('hibernated', 'failed', 'deleted'))
order by s.id;

-- name: known
-- Which of the snapshots that a node has are anybody's.
select id from snapshots where id = any(%(ids)s);

-- name: stranded
-- Begun on a node whose workspace has moved to another one meanwhile.
select s.id, s.workspace_id from snapshots s join workspaces w on w.id = s.workspace_id
where s.node_id = %(node_id)s and s.state = 'pending' and w.node_id <> s.node_id;

-- name: scopes
-- What may be collected: not where a recovery had losses a short while ago, unless the tenant was shredded since.
select c.scope from store_scopes c
where c.collect_after is null or c.collect_after <= perdure_now()
   or exists (select 1 from tenant_shreds t where t.tenant_id = c.scope)
order by c.scope = %(images)s, c.scope;

-- name: release_snapshots
-- Of one tenant: items of snapshots that were removed. The scope is locked, and an upload that has begun finds out at its next step.
update store_items i set state = 'released'
where i.scope = %(scope)s and i.state <> 'released' and i.name like 'snp\_%%'
  and not exists (select 1 from snapshots s where s.id = i.name and s.state = 'complete')
returning i.name;

-- name: release_images
-- Images that nothing in the store lies on, of which there are no snapshots and no workspaces either.
update store_items i set state = 'released'
where i.scope = %(scope)s and i.state = 'durable' and i.name like 'img-%%'
  and not exists (select 1 from store_needs n where n.need_scope = i.scope and n.need_name = i.name)
  and not exists (select 1 from snapshots s where s.state <> 'deleting' and starts_with(i.name, 'img-' || s.image || '-'))
  and not exists (select 1 from workspaces w where w.state <> 'deleted' and starts_with(i.name, 'img-' || w.image || '-'))
returning i.name;

-- name: lease_of
-- Whether a node may still run something.
select id, state, lease_until > perdure_now() and state = 'up' as is_leased from nodes where id = %(id)s for share;

-- name: move_workspace
-- To another node: the old one holds no lease any more, and nothing of the workspace runs.
update workspaces set node_id = %(to)s, state_detail = %(detail)s
where id = %(id)s and node_id = %(from)s and generation = %(generation)s and state in ('hibernated', 'failed')
returning journal_append(tenant_id, id, 'moved', generation, %(body)s) as seq;

-- name: move_snapshots
-- What of a workspace any node can have goes with it; the rest stays with the node that has it.
update snapshots s set node_id = %(to)s
where s.workspace_id = %(id)s and s.node_id = %(from)s and s.state = 'complete'
  and exists (select 1 from store_items i where i.scope = s.tenant_id and i.name = s.id and i.state = 'durable')
returning s.id;
