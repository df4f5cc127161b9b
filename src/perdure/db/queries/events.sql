-- name: turn
-- Until the transaction ends nobody else numbers. What others have committed before that is seen by the next statement.
select pg_advisory_xact_lock(7365108), exists (select 1 from webhooks) as has_webhooks;

-- name: number
-- Give every entry without a number the next one of its tenant, and put it before the webhooks that want it. Entries of one thread
-- keep their order: a later one is inserted only after the earlier one is committed. A webhook is not told of its own failure.
with moved as (
    delete from event_inbox returning tenant_id, workspace_id, entry_seq, at
), counted as (
    select tenant_id, count(*) as added from moved group by tenant_id
), heads as (
    insert into event_heads as h (tenant_id, seq) select tenant_id, added from counted
    on conflict (tenant_id) do update set seq = h.seq + excluded.seq
    returning tenant_id, seq
), numbered as (
    insert into events (tenant_id, seq, workspace_id, entry_seq)
    select m.tenant_id,
           h.seq - c.added + row_number() over (partition by m.tenant_id order by m.at, m.workspace_id, m.entry_seq),
           m.workspace_id, m.entry_seq
    from moved m join counted c on c.tenant_id = m.tenant_id join heads h on h.tenant_id = m.tenant_id
    returning tenant_id, seq, workspace_id, entry_seq
), offered as (
    insert into webhook_deliveries (webhook_id, tenant_id, event_seq, due_at)
    select w.id, n.tenant_id, n.seq, perdure_now()
    from numbered n
    join webhooks w on w.tenant_id = n.tenant_id
    join journal j on j.workspace_id = n.workspace_id and j.seq = n.entry_seq
    where (cardinality(w.kinds) = 0 or j.kind = any(w.kinds))
      and not (j.kind = 'webhook-failed' and j.body->>'webhook_id' = w.id)
    for key share of w
    returning webhook_id
)
select (select count(*) from numbered) as numbered, (select count(*) from offered) as offered;

-- name: heads
-- The last number of each of these tenants.
select tenant_id, seq from event_heads where tenant_id = any(%(tenants)s);

-- name: workspaces
-- The ids of what has, or had, an id or a name; the tenant's own thread is under its id.
select id from workspaces where tenant_id = %(tenant_id)s and (id = %(ref)s or name = %(ref)s)
union select %(tenant_id)s::text where %(ref)s::text = %(tenant_id)s::text;

-- name: read
-- A tenant's events in their order, of these workspaces and kinds; an empty list means all.
select e.seq, j.at, j.kind, j.generation, j.body::text as body, e.workspace_id, e.entry_seq, w.name
from events e
join journal j on j.workspace_id = e.workspace_id and j.seq = e.entry_seq
left join workspaces w on w.id = e.workspace_id
where e.tenant_id = %(tenant_id)s and e.seq > %(after)s and e.seq <= %(head)s
  and (cardinality(%(workspaces)s::text[]) = 0 or e.workspace_id = any(%(workspaces)s::text[]))
  and (cardinality(%(kinds)s::text[]) = 0 or j.kind = any(%(kinds)s::text[]))
order by e.seq
limit %(limit)s;

-- name: tail
-- The first of the last so many that would be read.
select min(seq) as seq from (
    select e.seq
    from events e join journal j on j.workspace_id = e.workspace_id and j.seq = e.entry_seq
    where e.tenant_id = %(tenant_id)s and e.seq <= %(head)s
      and (cardinality(%(workspaces)s::text[]) = 0 or e.workspace_id = any(%(workspaces)s::text[]))
      and (cardinality(%(kinds)s::text[]) = 0 or j.kind = any(%(kinds)s::text[]))
    order by e.seq desc
    limit %(last)s
) as tail;
