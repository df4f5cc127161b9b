-- name: insert
insert into api_keys (id, tenant_id, name, hash, prefix, scopes, created_by, expires_at)
values (%(id)s, %(tenant_id)s, %(name)s, %(hash)s, %(prefix)s, %(scopes)s, %(by)s,
        perdure_now() + make_interval(secs => %(expires_s)s::double precision))
returning *, 'active' as state;

-- name: of_tenant
-- All there ever were, newest last, from behind a place (null: from the first).
select *, case when revoked_at is not null then 'revoked' when expires_at <= perdure_now() then 'expired' else 'active' end as state
from api_keys
where tenant_id = %(tenant_id)s
  and (created_at, id) > (coalesce(%(after_at)s::timestamptz, '-infinity'), coalesce(%(after_id)s::text, ''))
order by created_at, id
limit %(limit)s;

-- name: counting
-- A key that counts, by its hash or its id. ``left_s``: seconds until it expires; null: never. ``is_unnoted``: its last use was noted ten minutes ago or more.
select id, tenant_id, scopes, extract(epoch from expires_at - perdure_now())::double precision as left_s,
       coalesce(last_used_at <= perdure_now() - interval '10 minutes', true) as is_unnoted
from api_keys
where (hash = %(hash)s::bytea or id = %(id)s::text) and revoked_at is null and (expires_at is null or expires_at > perdure_now());

-- name: ended
-- Those of these keys that count no more.
select k.id from unnest(%(ids)s::text[]) as k (id)
where not exists (
    select 1 from api_keys a
    where a.id = k.id and a.revoked_at is null and (a.expires_at is null or a.expires_at > perdure_now()));

-- name: used
-- Roughly when: a key that is used all the time is written six times an hour.
update api_keys set last_used_at = perdure_now() where id = %(id)s;

-- name: revoke
-- By id or, as long as it is not revoked, by name. Who revokes it again changes nothing.
update api_keys
set revoked_at = coalesce(revoked_at, perdure_now()), revoked_by = coalesce(revoked_by, %(by)s)
where tenant_id = %(tenant_id)s and (id = %(ref)s or (name = %(ref)s and revoked_at is null))
returning *, 'revoked' as state;
