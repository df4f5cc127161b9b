-- name: insert
-- No row where the tenant has as many as it may.
insert into webhooks (id, tenant_id, url, kinds, created_by)
select %(id)s, %(tenant_id)s, %(url)s, %(kinds)s::text[], %(by)s
where (select count(*) from webhooks where tenant_id = %(tenant_id)s) < %(most)s
returning *, 0::bigint as pending, 0::bigint as failed;

-- name: of_tenant
-- Oldest first, with what is still to be delivered and what was given up.
select w.*, count(d.event_seq) filter (where d.state = 'pending') as pending, count(d.event_seq) filter (where d.state = 'failed') as failed
from webhooks w left join webhook_deliveries d on d.webhook_id = w.id
where w.tenant_id = %(tenant_id)s
group by w.id
order by w.created_at, w.id;

-- name: by_id
-- One of a tenant's.
select id, url from webhooks where tenant_id = %(tenant_id)s and id = %(id)s;

-- name: remove
-- What was to be delivered goes with it.
delete from webhooks where tenant_id = %(tenant_id)s and id = %(id)s returning id;

-- name: claim
-- The delivery that is due longest, with all that it says, for one attempt; none of a webhook that is busy. Whoever does not record
-- the outcome before the lease is over has died, and the delivery is due again.
with due as (
    select webhook_id, event_seq
    from webhook_deliveries
    where state = 'pending' and due_at <= perdure_now() and not webhook_id = any(%(busy)s::text[])
    order by due_at, event_seq
    limit 1
    for update skip locked
), claimed as (
    update webhook_deliveries d
    set attempts = d.attempts + 1, generation = d.generation + 1, first_at = coalesce(d.first_at, perdure_now()),
        due_at = perdure_now() + make_interval(secs => %(lease_s)s)
    from due
    where d.webhook_id = due.webhook_id and d.event_seq = due.event_seq
    returning d.webhook_id, d.tenant_id, d.event_seq, d.generation, d.attempts, d.first_at
)
select c.webhook_id, c.tenant_id, c.generation as attempt_generation, c.attempts,
       extract(epoch from perdure_now() - c.first_at)::double precision as age_s, h.url,
       c.event_seq as seq, j.at, j.kind, j.generation, j.body::text as body, e.workspace_id, e.entry_seq, w.name
from claimed c
join webhooks h on h.id = c.webhook_id
join events e on e.tenant_id = c.tenant_id and e.seq = c.event_seq
join journal j on j.workspace_id = e.workspace_id and j.seq = e.entry_seq
left join workspaces w on w.id = e.workspace_id;

-- name: delivered
-- An attempt succeeded.
with done as (
    delete from webhook_deliveries
    where webhook_id = %(webhook_id)s and event_seq = %(seq)s and generation = %(generation)s
    returning webhook_id
)
update webhooks
set delivered = delivered + 1, delivered_at = perdure_now(), last_error = '', state = 'active',
    generation = generation + (state <> 'active')::int
where id in (select webhook_id from done);

-- name: postponed
-- An attempt failed, and another one follows.
with put_off as (
    update webhook_deliveries
    set due_at = perdure_now() + make_interval(secs => %(wait_s)s), last_error = %(error)s
    where webhook_id = %(webhook_id)s and event_seq = %(seq)s and generation = %(generation)s and state = 'pending'
    returning webhook_id
)
update webhooks set failed_at = perdure_now(), last_error = %(error)s where id in (select webhook_id from put_off);

-- name: give_up
-- An attempt failed, and it was the last one. Returns the webhook if it was not failing before.
with given_up as (
    update webhook_deliveries set state = 'failed', last_error = %(error)s
    where webhook_id = %(webhook_id)s and event_seq = %(seq)s and generation = %(generation)s and state = 'pending'
    returning webhook_id
)
update webhooks w
set failed_at = perdure_now(), last_error = %(error)s, state = 'failing', generation = w.generation + (was.state <> 'failing')::int
from (select id, state from webhooks where id = %(webhook_id)s for update) as was
where w.id = was.id and w.id in (select webhook_id from given_up)
returning w.id, was.state <> 'failing' as is_news;

-- name: tell
-- In the tenant's own thread, whose generation never goes back.
select journal_append(%(tenant_id)s, %(tenant_id)s, 'webhook-failed',
                      (select coalesce(max(generation), 1) from journal where workspace_id = %(tenant_id)s), %(body)s) as seq;

-- name: deliveries
-- What is still to be delivered to a webhook and what was given up, by the events' numbers, from behind one of them.
select d.event_seq as seq, d.state, d.attempts, d.due_at, d.last_error, j.at, j.kind, e.workspace_id, w.name as workspace
from webhook_deliveries d
join events e on e.tenant_id = d.tenant_id and e.seq = d.event_seq
join journal j on j.workspace_id = e.workspace_id and j.seq = e.entry_seq
left join workspaces w on w.id = e.workspace_id
where d.tenant_id = %(tenant_id)s and d.webhook_id = %(webhook_id)s and d.event_seq > %(after)s
order by d.event_seq
limit %(limit)s;

-- name: again
-- What was given up is due as if it had just happened: all of it, or the events of these numbers. The clock is read once, so that
-- they are sent in order.
update webhook_deliveries
set state = 'pending', generation = generation + 1, attempts = 0, first_at = null, due_at = (select perdure_now())
where tenant_id = %(tenant_id)s and webhook_id = %(webhook_id)s and state = 'failed'
  and (%(seqs)s::bigint[] is null or event_seq = any(%(seqs)s::bigint[]))
returning event_seq as seq;

-- name: prune
-- A bounded number of those that were given up so long ago. The lease of its last attempt is the last that was written of each.
delete from webhook_deliveries where (webhook_id, event_seq) in (
    select webhook_id, event_seq from webhook_deliveries
    where state = 'failed' and due_at < perdure_now() - make_interval(secs => %(keep_s)s::double precision)
    limit 10000);
