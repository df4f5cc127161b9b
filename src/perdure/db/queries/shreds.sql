-- name: of
select tenant_id, state, generation, asked_at, done_at from tenant_shreds where tenant_id = %(tenant_id)s;

-- name: all
-- In the order of their ids.
select tenant_id, state from tenant_shreds order by tenant_id;

-- name: tenants
-- Every tenant, and whoever else has, or had, anything.
select tenant_id from tenants
union select tenant_id from workspaces
union select scope from store_scopes where scope <> %(images)s
union select tenant_id from tenant_shreds order by 1;

-- name: ask
-- Intent, with the scope of the tenant locked. Asked again, it is for what the tenant has made since.
insert into tenant_shreds (tenant_id, state) values (%(tenant_id)s, 'asked')
on conflict (tenant_id) do update
set state = 'asked', generation = tenant_shreds.generation + 1, asked_at = perdure_now(), done_at = null
returning journal_append(tenant_id, tenant_id, 'shredding', generation, %(body)s) as seq;

-- name: release
-- What nobody can read when the key is gone is durable no longer; the collection takes it.
update store_items set state = 'released' where scope = %(tenant_id)s and state <> 'released';

-- name: living
-- Workspaces of a tenant that are not deleted.
select id, name from workspaces where tenant_id = %(tenant_id)s and state <> 'deleted' order by name;

-- name: doomed
-- Those that go with it: what there was when it was asked for, and what was kept of their machines after that. ``node_id``: of this
-- node; null: of all.
select w.id, w.name from workspaces w join tenant_shreds t on t.tenant_id = w.tenant_id
where w.tenant_id = %(tenant_id)s and w.state <> 'deleted' and (w.created_at <= t.asked_at or w.kind = 'lost')
  and (%(node_id)s::text is null or w.node_id = %(node_id)s)
order by w.name;

-- name: done
-- Nothing of what had to go is left; no row while there is. A node that was away may still have its copy of the key, and throws it
-- away when it is back.
update tenant_shreds t set state = 'done', done_at = perdure_now()
where t.tenant_id = %(tenant_id)s and t.state = 'asked'
  and not exists (select 1 from workspaces w
                  where w.tenant_id = t.tenant_id and w.state <> 'deleted' and (w.created_at <= t.asked_at or w.kind = 'lost'))
returning journal_append(t.tenant_id, t.tenant_id, 'shredded', t.generation, %(body)s) as seq;
