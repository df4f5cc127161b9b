-- name: claim
-- Nothing when the key stands for a command already.
insert into exec_keys (tenant_id, workspace_id, key, exec_id, digest, generation)
values (%(tenant_id)s, %(workspace_id)s, %(key)s, %(exec_id)s, %(digest)s, %(generation)s)
on conflict do nothing
returning exec_id;

-- name: find
select exec_id, digest, generation
from exec_keys
where tenant_id = %(tenant_id)s and workspace_id = %(workspace_id)s and key = %(key)s;

-- name: release
-- For a command that was refused before it began.
delete from exec_keys where tenant_id = %(tenant_id)s and workspace_id = %(workspace_id)s and key = %(key)s;

-- name: forget_old
-- A few at a time, of all tenants, each time that somebody uses a new one.
delete from exec_keys
where (workspace_id, key) in (
    select workspace_id, key from exec_keys
    where created_at < perdure_now() - interval '7 days'
    order by created_at limit 50 for update skip locked
);
