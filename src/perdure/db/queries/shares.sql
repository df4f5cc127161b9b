-- name: put
-- Share a port, or share it anew: links that are out go on to count. ``link_id`` null: no new link, the port is public. No port in
-- the row: it has as many links as it may. The workspace's row is locked, for the entry in its thread.
with w as (
    select id, tenant_id, generation from workspaces
    where tenant_id = %(tenant_id)s and (id = %(ref)s or name = %(ref)s) and state <> 'deleted'
    for update
), moment as materialized (  -- once: the clock goes on within a statement
    select perdure_now() + make_interval(secs => %(expires_s)s::double precision) as until
), ended as (
    delete from port_links l using w where l.workspace_id = w.id and l.port = %(port)s and l.until <= perdure_now()
), put as (
    insert into port_shares as p (workspace_id, port, tenant_id, series, is_public, links_until, shared_by)
    select id, %(port)s, tenant_id, %(series)s, %(is_public)s, until, %(by)s
    from w, moment
    where %(link_id)s::text is null or %(most)s > (
        select count(*) from port_links l where l.workspace_id = w.id and l.port = %(port)s and l.until > perdure_now())
    on conflict (workspace_id, port) do update
    set is_public = p.is_public or excluded.is_public,
        links_until = greatest(p.links_until, excluded.links_until),
        shared_at = perdure_now(),
        shared_by = excluded.shared_by
    returning *
), linked as (
    insert into port_links (id, tenant_id, workspace_id, port, until, made_by)
    select %(link_id)s, tenant_id, workspace_id, port, until, %(by)s from put, moment where %(link_id)s::text is not null
    returning made_at, until
)
select put.*, linked.made_at, linked.until, case when put.port is not null then
       journal_append(w.tenant_id, w.id, 'port-shared', w.generation, %(body)s) end as seq
from w left join put on true left join linked on true;

-- name: lock
-- Hold a workspace, so that nobody shares one of its ports meanwhile.
select id, generation from workspaces
where tenant_id = %(tenant_id)s and (id = %(ref)s or name = %(ref)s) and state <> 'deleted'
for update;

-- name: revoke
-- Take back one link. No row: there is none of that id that counts.
delete from port_links
where tenant_id = %(tenant_id)s and workspace_id = %(workspace_id)s and id = %(id)s and until > perdure_now()
returning port, until;

-- name: revoked
-- What that leaves of its port: links may end sooner now, and a port without one, which is not public, is shared no more. Where
-- links were given out before links were rows, nobody knows when the last of them ends but from what stands there.
with left_over as (
    select max(until) as until from port_links
    where workspace_id = %(workspace_id)s and port = %(port)s and until > perdure_now()
), shorter as (
    update port_shares p set links_until = left_over.until
    from left_over
    where p.workspace_id = %(workspace_id)s and p.port = %(port)s and p.links_until = %(until)s
      and (p.is_public or left_over.until is not null)
    returning p.port
), gone as (
    delete from port_shares p using left_over
    where p.workspace_id = %(workspace_id)s and p.port = %(port)s and p.links_until = %(until)s
      and not p.is_public and left_over.until is null
    returning p.port
)
select journal_append(%(tenant_id)s, %(workspace_id)s, 'link-revoked', %(generation)s, %(body)s) as seq,
       (select count(*) from shorter) + (select count(*) from gone) as changed;

-- name: links
-- Links of a workspace that count, those of one port where it is named, the oldest first, from behind a place (null: from the first).
select l.id, l.port, l.until, l.made_at, l.made_by
from port_links l join workspaces w on w.id = l.workspace_id
where l.tenant_id = %(tenant_id)s and (w.id = %(ref)s or w.name = %(ref)s) and w.state <> 'deleted'
  and (%(port)s::int is null or l.port = %(port)s) and l.until > perdure_now()
  and (l.made_at, l.id) > (coalesce(%(after_at)s::timestamptz, '-infinity'), coalesce(%(after_id)s::text, ''))
order by l.made_at, l.id
limit %(limit)s;

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
select w.id as workspace_id, w.tenant_id, p.port, p.series, p.is_public, p.links_until, p.shared_at, p.shared_by
from workspaces w left join port_shares p on p.workspace_id = w.id
where w.tenant_id = %(tenant_id)s and (w.id = %(ref)s or w.name = %(ref)s) and w.state <> 'deleted'
order by p.port;

-- name: of_grant
-- What is left of what a token stands for, and the time by which it is judged.
select extract(epoch from perdure_now())::double precision as now_s, w.name, p.*,
       exists (select 1 from port_links l where l.id = %(link)s::text and l.workspace_id = p.workspace_id and l.port = p.port) as has_link
from (values (%(workspace_id)s, %(port)s)) as g (workspace_id, port)
left join workspaces w on w.id = g.workspace_id and w.state <> 'deleted'
left join port_shares p on p.workspace_id = w.id and p.port = g.port;

-- name: ended
-- Those of these grants that count no more, by their numbers. Without a link: of a public port, or of the time before links had ids.
select g.n
from unnest(%(workspaces)s::text[], %(ports)s::int[], %(series)s::bigint[], %(links)s::text[], %(untils)s::bigint[])
     with ordinality as g (workspace_id, port, series, link, until_s, n)
where g.until_s <= extract(epoch from perdure_now())
   or (g.link is not null and not exists (select 1 from port_links l where l.id = g.link))
   or not exists (
       select 1 from port_shares p join workspaces w on w.id = p.workspace_id
       where p.workspace_id = g.workspace_id and p.port = g.port and p.series = g.series and w.state <> 'deleted');

-- name: public
-- By id, or by name in one tenant.
select p.* from port_shares p join workspaces w on w.id = p.workspace_id
where p.port = %(port)s and p.is_public and w.state <> 'deleted'
  and (w.id = %(ref)s or (w.name = %(ref)s and w.tenant_id = %(tenant_id)s));
