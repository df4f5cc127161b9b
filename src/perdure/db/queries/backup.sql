-- name: snapshots
-- Complete snapshots at an instant: what a backup must hold.
select id, tenant_id, workspace_id from snapshots where state = 'complete' order by id;

-- name: workspaces
-- Those that are not deleted: a backup needs the images of those that have no snapshot yet, too.
select id, tenant_id, name, state, generation, image, head_snapshot_id from workspaces where state <> 'deleted' order by id;

-- name: hold
-- A backup needs these. Whoever is about to remove one of them has come first, and then it is not among the answers, or sees this
-- row (see ``retention.lock``). In the order of their ids, like everybody's locks.
with held as (select id, tenant_id from snapshots where id = any(%(ids)s) and state = 'complete' order by id for update)
insert into snapshot_references (tenant_id, snapshot_id, kind, holder)
select tenant_id, id, 'backup', %(holder)s from held
on conflict do nothing
returning snapshot_id;

-- name: held
select snapshot_id from snapshot_references where kind = 'backup' and holder = %(holder)s;

-- name: let_go
-- A backup is done with them, or has failed.
delete from snapshot_references where kind = 'backup' and holder = %(holder)s;

-- name: let_go_others
-- Of backups that are over and could not say so: their database was away. ``alive`` is the one under way, or null.
delete from snapshot_references where kind = 'backup' and holder is distinct from %(alive)s;

-- name: let_go_all
-- Of backups whose server was killed: no backup is under way when a server starts.
delete from snapshot_references where kind = 'backup';

-- name: forget_strays
-- After a restore: what the object store held then may be gone from it, and what is there now is another installation's.
delete from store_strays;

-- name: forget_holds
delete from store_holds;

-- name: forget_packs
delete from store_packs;

-- name: forget_needs
delete from store_needs;

-- name: forget_items
delete from store_items;

-- name: forget_keys
-- The new life has the keys that its backup brought, or new ones.
update store_scopes set key_mark = null, key_node = null;

-- name: forget_shreds
-- What was shredded to its end was shredded in the store that the earlier life used; its key is in no backup that was made since.
-- One that was only asked for is brought to its end here too.
delete from tenant_shreds where state = 'done';

-- name: new_installation
-- An object store that the earlier life used stays that one's until somebody takes it over on purpose: what it holds may be newer
-- than the backup, and to a garbage collection it would be strays.
update installation set id = 'ins_' || replace(gen_random_uuid()::text, '-', '');

-- name: nodes_down
-- The machines of another life run no workspace of this one.
update nodes set state = 'down', lease_until = least(lease_until, perdure_now());

-- name: unfinished
-- Snapshots that were being made or removed at the instant of the backup; their files are not in it.
select id from snapshots where state <> 'complete';

-- name: moved_snapshots
-- Everything is on this node now.
update snapshots set node_id = %(node_id)s;

-- name: fall_back
-- Workspaces whose head is not in the backup are at the closest ancestor that is, else at the newest of their own, else nowhere.
with recursive way as (
    select w.id as workspace_id, s.id, s.parent_id, 0 as distance
    from workspaces w join snapshots s on s.id = w.head_snapshot_id where s.id = any(%(ids)s::text[])
    union all
    select way.workspace_id, p.id, p.parent_id, way.distance + 1
    from snapshots p join way on p.id = way.parent_id where way.distance < 100000
)
update workspaces w
set head_snapshot_id = coalesce(
    (select s.id from way join snapshots s on s.id = way.id
     where way.workspace_id = w.id and s.state = 'complete' and not s.id = any(%(ids)s::text[]) order by way.distance limit 1),
    (select s.id from snapshots s
     where s.workspace_id = w.id and s.state = 'complete' and not s.id = any(%(ids)s::text[])
     order by s.created_at desc, s.id desc limit 1))
where w.head_snapshot_id = any(%(ids)s::text[]);

-- name: without_memory
-- Snapshots of which the backup has the disk alone.
update snapshots
set has_memory = false, pages = 0, memory_bytes = 0, memory_total_bytes = 0, device_bytes = 0, fingerprint = ''
where id = any(%(ids)s::text[]);

-- name: fallen
-- A workspace that is not where it was. What it had failed of is not there any more.
update workspaces set state = 'hibernated', state_detail = %(detail)s, rewound = %(rewound)s
where id = %(id)s and state <> 'deleted'
returning journal_append(tenant_id, id, 'left-out', generation, %(body)s) as seq;

-- name: unborn
-- Creates that nobody was told of.
update workspaces set state = 'deleted', state_detail = %(detail)s, state_changed_at = perdure_now(), node_id = %(node_id)s
where state = 'creating'
returning id, journal_append(tenant_id, id, 'deleted', generation, %(body)s) as seq;

-- name: asleep
-- Every workspace begins a life of its own: asleep (or failed, as it was) at its last snapshot, in a generation that no earlier life
-- can have reached: those count up from one, or from the second in which they were restored.
update workspaces
set state = case when state = 'failed' then state else 'hibernated' end,
    state_detail = case when state = 'failed' then state_detail else %(detail)s end,
    generation = greatest(generation + 1, floor(extract(epoch from perdure_now()))::bigint),
    node_id = %(node_id)s, confinement = null, keep_awake_until = null, rewound = %(rewound)s, state_changed_at = perdure_now()
where state <> 'deleted'
returning id, name, state, generation, head_snapshot_id, journal_append(tenant_id, id, 'restored', generation, %(body)s) as seq;

-- name: moved_deleted
-- Deleted ones keep their history, on this node.
update workspaces set node_id = %(node_id)s where state = 'deleted';
