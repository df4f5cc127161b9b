-- name: workspaces
-- A node's workspaces by state, and the memory of their machines.
select state, count(*) as count, sum(memory_mib)::bigint as memory_mib
from workspaces
where node_id = %(node_id)s and state <> 'deleted'
group by state;

-- name: backlog
-- What of a node's snapshots the object store does not have yet.
select count(*) as count, coalesce(sum(s.memory_bytes + s.disk_bytes + s.device_bytes), 0)::bigint as bytes
from snapshots s
where s.node_id = %(node_id)s and s.state = 'complete'
  and not exists (select 1 from store_items i where i.scope = s.tenant_id and i.name = s.id and i.state = 'durable');

-- name: stored
-- What is stored now, on nodes and in the object store.
select place, sum(bytes)::bigint as bytes from stored_spans where to_at is null group by place;

-- name: commits
-- Of all transactions in this database since it was made, reads among them.
select xact_commit as commits from pg_stat_database where datname = current_database();
