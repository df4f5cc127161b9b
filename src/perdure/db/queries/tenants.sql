-- name: insert
insert into tenants (tenant_id, name, created_by) values (%(id)s, %(name)s, %(by)s)
returning tenant_id, name, created_at, created_by;

-- name: all
select tenant_id, name, created_at, created_by from tenants order by created_at, tenant_id;

-- name: by_ref
select tenant_id, name, created_at, created_by from tenants where tenant_id = %(ref)s or name = %(ref)s;

-- name: adopt
-- A tenant of which something was found without its row, under a name made of its id.
insert into tenants (tenant_id, name, created_by) values (%(id)s, replace(%(id)s, '_', '-'), 'recovery')
on conflict do nothing;
