-- name: register
-- A node process comes up. Its generation fences any earlier process of the same node.
insert into nodes (id, tenant_id, state, lease_until)
values (%(id)s, %(tenant_id)s, 'up', perdure_now() + make_interval(secs => %(lease_s)s))
on conflict (id) do update set state = 'up', generation = nodes.generation + 1, lease_until = excluded.lease_until,
                               seen_at = perdure_now()
returning generation;

-- name: renew
-- Extend the lease; no row when another process of this node has registered since, or it was taken down.
update nodes set lease_until = perdure_now() + make_interval(secs => %(lease_s)s), seen_at = perdure_now(),
                 machines_at = case when compared_generation = generation then perdure_now() else machines_at end
where id = %(id)s and generation = %(generation)s and state = 'up'
returning generation;

-- name: release
-- An orderly end: nobody has to wait for the lease to run out.
update nodes set state = 'down', lease_until = perdure_now(), seen_at = perdure_now()
where id = %(id)s and generation = %(generation)s;

-- name: compared
-- Rows and machines of a node agree; from here on a renewal says that they still do.
update nodes set compared_generation = generation, machines_at = perdure_now() where id = %(id)s;

-- name: last_sign
-- When a workspace's machine was last known to run: its node's last renewal, or what the workspace has done since.
select greatest(n.machines_at, w.state_changed_at,
                (select max(j.at) from journal j
                 where j.workspace_id = w.id and j.generation = w.generation and j.kind in ('checkpoint', 'running'))) as alive_at
from workspaces w join nodes n on n.id = w.node_id where w.id = %(id)s and n.machines_at is not null;

-- name: all
select id, state, generation, lease_until, lease_until > perdure_now() as is_leased from nodes order by id;
