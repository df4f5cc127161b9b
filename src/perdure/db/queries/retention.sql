-- name: lock
-- A workspace's snapshots, before it is read who needs them: whoever is about to make one of them a head waits, or has come first
-- and is then seen. In the order of their ids, so that two of these never wait for each other.
select id from snapshots where workspace_id = %(workspace_id)s and state = 'complete' order by id for update;

-- name: entries
-- A workspace's snapshots and all that its head descends from. Those on their way out still link the others.
with recursive way as (
    select s.id, s.parent_id from snapshots s join workspaces w on w.head_snapshot_id = s.id where w.id = %(workspace_id)s
    union
    select s.id, s.parent_id from snapshots s join way on s.id = way.parent_id
)
select s.id, s.workspace_id, s.parent_id, s.reason, s.name is not null as is_named, s.state = 'deleting' as is_going
from snapshots s
where s.state <> 'pending' and (s.workspace_id = %(workspace_id)s or s.id in (select id from way));

-- name: holders
-- The workspace, unless it is deleted, and every other one that stands on its snapshots.
select w.id, w.name, w.head_snapshot_id, w.forked_from, w.keep_snapshots
from workspaces w
where w.state <> 'deleted'
  and (w.id = %(workspace_id)s
       or w.head_snapshot_id in (select s.id from snapshots s where s.workspace_id = %(workspace_id)s)
       or w.forked_from in (select s.id from snapshots s where s.workspace_id = %(workspace_id)s));

-- name: used_by
-- What else needs a workspace's snapshots.
select r.snapshot_id, r.kind, r.holder from snapshot_references r join snapshots s on s.id = r.snapshot_id
where s.workspace_id = %(workspace_id)s order by r.kind, r.holder;

-- name: entries_of_node
-- All snapshots of a node, as ``entries`` has them.
select id, workspace_id, parent_id, reason, name is not null as is_named, state = 'deleting' as is_going
from snapshots where node_id = %(node_id)s and state <> 'pending';

-- name: holders_of_node
-- All workspaces of a node that are not deleted.
select id, name, head_snapshot_id, forked_from, keep_snapshots from workspaces where node_id = %(node_id)s and state <> 'deleted';

-- name: used_of_node
-- What else needs a node's snapshots.
select r.snapshot_id, r.kind, r.holder from snapshot_references r join snapshots s on s.id = r.snapshot_id
where s.node_id = %(node_id)s order by r.kind, r.holder;

-- name: mark
-- These go: the node deletes their files, then their rows are dropped.
update snapshots set state = 'deleting' where id = any(%(ids)s) and state = 'complete' returning id;

-- name: give_up
-- What a workspace that is being deleted had begun to capture.
update snapshots set state = 'deleting' where workspace_id = %(workspace_id)s and state = 'pending' returning id;

-- name: drop
-- The rows of snapshots that the node does not have (any more). What descends from them hangs on the next ancestor that stays.
with recursive gone as (
    select id, parent_id from snapshots where id = any(%(ids)s) and state <> 'complete'
), up as (
    select id, parent_id from gone
    union
    select up.id, gone.parent_id from up join gone on gone.id = up.parent_id
), moved as (
    update snapshots s set parent_id = up.parent_id from up
    where s.parent_id = up.id and not exists (select 1 from gone where gone.id = s.id)
      and not exists (select 1 from gone where gone.id = up.parent_id)
)
delete from snapshots s using gone where s.id = gone.id;

-- name: rename
-- Give a snapshot a name, another one, or (null) none.
update snapshots set name = %(name)s where id = %(id)s and workspace_id = %(workspace_id)s and state = 'complete' returning *;

-- name: configure
-- What may be changed of a workspace at any time. null leaves a column as it is; ``default`` gives retention back to the setting.
-- Another wish for its long sleeps begins anew: what was announced of the earlier one does not count.
update workspaces
set keep_snapshots = case when %(default)s then null else coalesce(%(keep_snapshots)s::int, keep_snapshots) end,
    idle_timeout_s = coalesce(%(idle_timeout_s)s::double precision, idle_timeout_s),
    checkpoint_interval_s = coalesce(%(checkpoint_interval_s)s::double precision, checkpoint_interval_s),
    asleep_after_days = %(asleep_after_days)s::double precision,
    asleep_action = %(asleep_action)s::text,
    asleep_noted = case when asleep_action = %(asleep_action)s::text
                             and asleep_after_days is not distinct from %(asleep_after_days)s::double precision
                        then asleep_noted end
where id = %(id)s and state <> 'deleted'
returning journal_append(tenant_id, id, 'configured', generation, %(body)s) as seq;
