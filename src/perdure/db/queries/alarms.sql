-- name: set
-- When a workspace is to wake by itself; null: not any more.
update workspaces set wake_at = %(wake_at)s::timestamptz
where id = %(id)s and state <> 'deleted'
returning journal_append(tenant_id, id, 'wake-at', generation, %(body)s) as seq;

-- name: next
-- A node's times to wake at, earliest first, and in how many seconds each is due. What has failed waits until somebody recovers it.
-- ``has_store``: those of sleepers on nodes that are gone too, where the object store has all that a wake needs.
select w.id, extract(epoch from w.wake_at - perdure_now())::double precision as left_s
from workspaces w
where w.wake_at is not null and w.state not in ('failed', 'deleted') and not w.id = any(%(skip)s::text[])
  and (w.node_id = %(node_id)s
       or (%(has_store)s and w.state = 'hibernated'
           and exists (select 1 from store_items i
                       where i.scope = w.tenant_id and i.name = w.head_snapshot_id and i.state = 'durable')
           and not exists (select 1 from nodes n where n.id = w.node_id and n.state = 'up' and n.lease_until > perdure_now())))
order by w.wake_at, w.id
limit %(limit)s;

-- name: met
-- It is awake at the time: that is all there was to do.
update workspaces set wake_at = null
where id = %(id)s and generation = %(generation)s and state = 'running' and wake_at = %(wake_at)s
returning journal_append(tenant_id, id, 'wake-at-met', generation, %(body)s) as seq;
