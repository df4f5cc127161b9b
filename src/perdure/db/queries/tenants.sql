-- name: insert
insert into tenants (tenant_id, name, created_by) values (%(id)s, %(name)s, %(by)s)
returning tenant_id, name, created_at, created_by;

-- name: all
-- Oldest first, from behind a place (null: from the first).
select tenant_id, name, created_at, created_by from tenants
where (created_at, tenant_id) > (coalesce(%(after_at)s::timestamptz, '-infinity'), coalesce(%(after_id)s::text, ''))
order by created_at, tenant_id
limit %(limit)s;

-- name: by_ref
select tenant_id, name, created_at, created_by from tenants where tenant_id = %(ref)s or name = %(ref)s;

-- name: adopt
-- A tenant of which something was found without its row, under a name made of its id.
insert into tenants (tenant_id, name, created_by) values (%(id)s, replace(%(id)s, '_', '-'), 'recovery')
on conflict do nothing;
