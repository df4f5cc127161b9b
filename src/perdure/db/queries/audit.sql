-- name: begin
-- A call that is about to change something. It gets its row when it has been answered. A name of a workspace becomes its id.
insert into audit_begun (id, request_id, tenant_id, server, principal, route, target, peer)
values (%(id)s, %(request_id)s, %(tenant_id)s, %(server)s, %(principal)s, %(route)s,
        coalesce((select id from workspaces where tenant_id = %(tenant_id)s and name = %(workspace)s::text and state <> 'deleted')
                 || %(rest)s, %(target)s),
        %(peer)s);

-- name: finish
with begun as (delete from audit_begun where id = %(id)s returning *)
select audit_append(tenant_id, principal, route, coalesce(nullif(%(target)s, ''), target), %(outcome)s, %(status)s, request_id, peer, 1, true)
       as seq
from begun;

-- name: drop
-- What had begun was refused, and is put on record like other refusals.
delete from audit_begun where id = %(id)s returning id;

-- name: append
select audit_append(%(tenant_id)s, %(principal)s, %(route)s, %(target)s, %(outcome)s, %(status)s, %(request_id)s, %(peer)s,
                    %(repeated)s, false) as seq;

-- name: interrupted
-- What a server that ended had begun, and whatever has not ended after a day.
with begun as (
    delete from audit_begun where server = %(server)s::text or begun_at < perdure_now() - interval '1 day' returning *
)
select audit_append(tenant_id, principal, route, target, 'interrupted', 0, request_id, peer, 1, true) as seq from begun;

-- name: settle
-- Waits for rows that have their number and are not committed. Whoever reads after this sees every row up to the last one there is.
select pg_advisory_xact_lock(audit_lock());

-- name: page
-- Oldest first.
select seq, tenant_id, at, principal, route, target, outcome, status, request_id, peer, repeated
from audit
where seq > %(after)s
  and (%(tenant_id)s::text is null or tenant_id = %(tenant_id)s)
  and (%(since)s::timestamptz is null or at >= %(since)s)
order by seq
limit %(limit)s;

-- name: prune
-- A bounded number of those that are kept no longer.
delete from audit where seq in (
    select seq from audit where at < perdure_now() - make_interval(secs => %(keep_s)s::double precision) order by at limit 10000);
