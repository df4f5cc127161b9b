-- name: put
-- Share a port, or share it anew: links that are out go on to count. The workspace's row is locked, for the entry in its thread.
with w as (
    select id, tenant_id, generation from workspaces
    where tenant_id = %(tenant_id)s and (id = %(ref)s or name = %(ref)s) and state <> 'deleted'
    for update
), put as (
    insert into port_shares as p (workspace_id, port, tenant_id, series, is_public, links_until, shared_by)
    select id, %(port)s, tenant_id, %(series)s, %(is_public)s, perdure_now() + make_interval(secs => %(expires_s)s::double precision),
           %(by)s
    from w
    on conflict (workspace_id, port) do update
    set is_public = p.is_public or excluded.is_public,
        links_until = greatest(p.links_until, excluded.links_until),
        shared_at = perdure_now(),
        shared_by = excluded.shared_by
    returning *
)
select put.*, perdure_now() + make_interval(secs => %(expires_s)s::double precision) as until,
       journal_append(put.tenant_id, put.workspace_id, 'port-shared', w.generation, %(body)s) as seq
from put, w;

-- name: remove
-- No row: no such workspace. A later share begins another series, so that links of this one never count again.
with w as (
    select id, tenant_id, generation from workspaces
    where tenant_id = %(tenant_id)s and (id = %(ref)s or name = %(ref)s) and state <> 'deleted'
    for update
), gone as (
    delete from port_shares p using w where p.workspace_id = w.id and p.port = %(port)s returning p.port
)
select exists (select 1 from gone) as removed,
       (select journal_append(w.tenant_id, w.id, 'port-unshared', w.generation, %(body)s) from gone) as seq
from w;

-- name: of_workspace
-- At least one row when there is such a workspace; without a port when nothing of it is shared.
select w.id as workspace_id, w.tenant_id, p.port, p.is_public, p.links_until, p.shared_at, p.shared_by
from workspaces w left join port_shares p on p.workspace_id = w.id
where w.tenant_id = %(tenant_id)s and (w.id = %(ref)s or w.name = %(ref)s) and w.state <> 'deleted'
order by p.port;

-- name: of_grant
-- What is left of what a token stands for, and the time by which it is judged.
select extract(epoch from perdure_now())::double precision as now_s, w.name, p.*
from (values (%(workspace_id)s, %(port)s)) as g (workspace_id, port)
left join workspaces w on w.id = g.workspace_id and w.state <> 'deleted'
left join port_shares p on p.workspace_id = w.id and p.port = g.port;

-- name: public
-- By id, or by name in one tenant.
select p.* from port_shares p join workspaces w on w.id = p.workspace_id
where p.port = %(port)s and p.is_public and w.state <> 'deleted'
  and (w.id = %(ref)s or (w.name = %(ref)s and w.tenant_id = %(tenant_id)s));
