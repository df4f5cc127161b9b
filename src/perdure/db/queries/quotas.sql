-- name: of
select workspaces, memory_awake_mib, storage_gib, execs from tenant_quotas where tenant_id = %(tenant_id)s;

-- name: lock
-- Until the transaction ends, nobody else of the tenant is given anything.
select workspaces, memory_awake_mib, storage_gib, execs from tenant_quotas where tenant_id = %(tenant_id)s for update;

-- name: set
insert into tenant_quotas (tenant_id, workspaces, memory_awake_mib, storage_gib, execs, changed_by)
values (%(tenant_id)s, %(workspaces)s, %(memory_awake_mib)s, %(storage_gib)s, %(execs)s, %(by)s)
on conflict (tenant_id) do update
set workspaces = case when 'workspaces' = any(%(given)s::text[]) then excluded.workspaces else tenant_quotas.workspaces end,
    memory_awake_mib = case when 'memory_awake_mib' = any(%(given)s::text[]) then excluded.memory_awake_mib
                            else tenant_quotas.memory_awake_mib end,
    storage_gib = case when 'storage_gib' = any(%(given)s::text[]) then excluded.storage_gib else tenant_quotas.storage_gib end,
    execs = case when 'execs' = any(%(given)s::text[]) then excluded.execs else tenant_quotas.execs end,
    changed_at = perdure_now(), changed_by = excluded.changed_by
returning workspaces, memory_awake_mib, storage_gib, execs;

-- name: use
-- What a tenant has. What failed, and what was left of a lost machine, takes nobody's place; what has a machine, or is about to,
-- holds its memory. A snapshot counts once, by what it added, wherever its files are.
with standing as (
    select name, kind, state, memory_mib from workspaces where tenant_id = %(tenant_id)s and state <> 'deleted'
), awake as (
    select name, memory_mib from standing where state in ('creating', 'waking', 'running', 'hibernating')
)
select (select count(*) from standing where state <> 'failed' and kind <> 'lost') as workspaces,
       (select coalesce(sum(memory_mib), 0)::bigint from awake) as memory_awake_mib,
       (select coalesce(sum(bytes), 0)::bigint from stored_spans
        where tenant_id = %(tenant_id)s and place = 'node' and to_at is null) as storage_bytes,
       array(select name from awake order by memory_mib desc, name limit 20) as awake;
