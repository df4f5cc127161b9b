-- name: set
-- When a workspace is to wake by itself; null: not any more.
update workspaces set wake_at = %(wake_at)s::timestamptz
where id = %(id)s and state <> 'deleted'
returning journal_append(tenant_id, id, 'wake-at', generation, %(body)s) as seq;

-- name: next
-- A node's times to wake at, earliest first, and in how many seconds each is due. What has failed waits until somebody recovers it.
select id, extract(epoch from wake_at - perdure_now())::double precision as left_s
from workspaces
where node_id = %(node_id)s and wake_at is not null and state not in ('failed', 'deleted') and not id = any(%(skip)s::text[])
order by wake_at, id
limit %(limit)s;

-- name: met
-- It is awake at the time: that is all there was to do.
update workspaces set wake_at = null
where id = %(id)s and generation = %(generation)s and state = 'running' and wake_at = %(wake_at)s
returning journal_append(tenant_id, id, 'wake-at-met', generation, %(body)s) as seq;
