-- name: begin
-- New executions with the first entries of their histories, as a JSON array: the ``ord`` of those that were made. Not made is one
-- whose name is taken, or whose parent's operation has one. ``news`` goes to other servers, if anything was made.
with c as materialized (
    select * from json_to_recordset(%(changes)s::json) as c (
        ord int, id text, tenant_id text, function text, name text, arn text, input_digest text, status text, seq bigint, reason text,
        invoke_at timestamptz, timer_at timestamptz, priority int, key text, bound_digest text, parent_id text, parent_operation text,
        started text, head text, hash text, at timestamptz, actor text, ops json, entries json)
), made as (
    insert into executions (id, tenant_id, function, name, arn, input_digest, status, seq, reason, invoke_at, timer_at, priority, key,
                            bound_digest, parent_id, parent_operation, started, head, hash, started_at)
    select id, tenant_id, function, name, arn, decode(input_digest, 'hex'), status, seq, reason, invoke_at, timer_at, priority, key,
           bound_digest, parent_id, parent_operation, started::json, head::json, hash, at
    from c
    on conflict do nothing
    returning id
), operations as (
    insert into execution_operations (tenant_id, execution_id, id, position, type, status, started_at, op)
    select c.tenant_id, c.id, o.id, o.position, o.type, o.status, o.started_at, o.op::json
    from made join c using (id), json_to_recordset(c.ops)
         as o (id text, position int, type text, status text, started_at timestamptz, op text)
), entries as (
    insert into execution_entries (tenant_id, execution_id, seq, at, kind, actor, digest, fact, hash)
    select c.tenant_id, c.id, e.seq, e.at, e.kind, c.actor, e.digest, e.fact::json, e.hash
    from made join c using (id), json_to_recordset(c.entries)
         as e (seq bigint, at timestamptz, kind text, digest text, fact text, hash text)
), told as materialized (
    select pg_notify('perdure_runs', %(news)s::text) from made where %(news)s::text is not null limit 1
)
select coalesce((select array_agg(c.ord) from made join c using (id)), '{}') as done, perdure_now() as now,
       (select count(*) from told) as told;

-- name: commit
-- What was decided on executions, each at its ``before``, as a JSON array: its row, the operations that changed, its new entries, or
-- nothing at all; the ``ord`` of those that were written. Whoever works on one is believed in for another lease; a claim names
-- worker, slot and deadline. ``news`` goes to other servers, if anything was written.
with c as materialized (
    select * from json_to_recordset(%(changes)s::json) as c (
        ord int, id text, before bigint, seq bigint, status text, reason text, invoke_at timestamptz, timer_at timestamptz,
        bound_digest text, head text, hash text, ended_at timestamptz, owes_parent boolean, invocation bigint, worker_id text, slot int,
        deadline_at timestamptz, lease_s double precision, actor text, ops json, entries json)
), moved as (
    update executions e set
        seq = c.seq, status = c.status, reason = c.reason, invoke_at = c.invoke_at, timer_at = c.timer_at,
        bound_digest = c.bound_digest, head = c.head::json, hash = c.hash, ended_at = c.ended_at,
        is_told = e.is_told and not c.owes_parent,
        invocation = c.invocation,
        worker_id = case when c.invocation is not null then coalesce(c.worker_id, e.worker_id) end,
        slot = case when c.invocation is not null then coalesce(c.slot, e.slot) end,
        deadline_at = case when c.invocation is not null then coalesce(c.deadline_at, e.deadline_at) end,
        lease_until = case when c.invocation is null then null
                           when e.invocation = c.invocation and e.lease_until > perdure_now() + make_interval(secs => c.lease_s / 2)
                               then e.lease_until  -- an indexed column that stays saves the work on all indexes
                           else perdure_now() + make_interval(secs => c.lease_s) end
    from c
    where e.id = c.id and e.seq = c.before
    returning c.ord, e.tenant_id
), operations as (
    insert into execution_operations (tenant_id, execution_id, id, position, type, status, started_at, op)
    select moved.tenant_id, c.id, o.id, o.position, o.type, o.status, o.started_at, o.op::json
    from moved join c using (ord), json_to_recordset(c.ops)
         as o (id text, position int, type text, status text, started_at timestamptz, op text)
    on conflict (execution_id, id) do update set status = excluded.status, op = excluded.op
), entries as (
    insert into execution_entries (tenant_id, execution_id, seq, at, kind, actor, digest, fact, hash)
    select moved.tenant_id, c.id, e.seq, e.at, e.kind, c.actor, e.digest, e.fact::json, e.hash
    from moved join c using (ord), json_to_recordset(c.entries)
         as e (seq bigint, at timestamptz, kind text, digest text, fact text, hash text)
), told as materialized (
    select pg_notify('perdure_runs', %(news)s::text) from moved where %(news)s::text is not null limit 1
)
select coalesce((select array_agg(ord) from moved), '{}') as done, perdure_now() as now, (select count(*) from told) as told;

-- name: listen
listen perdure_runs;

-- name: load
-- One statement, so that row and operations are of one instant.
select e.tenant_id, e.status, e.started::text as started, e.head::text as head, e.hash, perdure_now() as now,
       e.key is not null or e.slot is not null as is_limited,
       coalesce((select array_agg(o.op::text) from execution_operations o where o.execution_id = e.id), '{}') as ops
from executions e
where e.id = %(id)s;

-- name: seq
select seq, perdure_now() as now from executions where id = %(id)s;

-- name: clock
select perdure_now() as now;

-- name: place
select priority, key from executions where id = %(id)s;

-- name: by_name
select id, arn, input_digest from executions
where tenant_id = %(tenant_id)s and function = %(function)s and name = %(name)s and status <> 'DELETING';

-- name: by_parent
select id, arn, input_digest from executions
where parent_id = %(parent_id)s and parent_operation = %(parent_operation)s;

-- name: children
-- What the chained invokes of an execution have started.
select parent_operation, arn from executions where parent_id = %(id)s;

-- name: entries
select seq, at, fact::text as fact from execution_entries where execution_id = %(id)s and seq > %(after)s order by seq limit %(limit)s;

-- name: list
-- A page of a tenant's executions. ``edge_at`` and ``edge_id``: of the last row of the page before.
select id, function, status, started_at, ended_at, arn, name from executions
where tenant_id = %(tenant_id)s and status <> 'DELETING'
  and (%(function)s::text is null or function = %(function)s)
  and (%(name)s::text is null or name = %(name)s)
  and (cardinality(%(statuses)s::text[]) = 0 or status = any(%(statuses)s))
  and (%(after)s::timestamptz is null or started_at > %(after)s)
  and (%(until)s::timestamptz is null or started_at < %(until)s)
  and (%(edge_at)s::timestamptz is null or (started_at, id) < (%(edge_at)s, %(edge_id)s))
order by started_at desc, id desc
limit %(limit)s;

-- name: list_oldest
select id, function, status, started_at, ended_at, arn, name from executions
where tenant_id = %(tenant_id)s and status <> 'DELETING'
  and (%(function)s::text is null or function = %(function)s)
  and (%(name)s::text is null or name = %(name)s)
  and (cardinality(%(statuses)s::text[]) = 0 or status = any(%(statuses)s))
  and (%(after)s::timestamptz is null or started_at > %(after)s)
  and (%(until)s::timestamptz is null or started_at < %(until)s)
  and (%(edge_at)s::timestamptz is null or (started_at, id) > (%(edge_at)s, %(edge_id)s))
order by started_at, id
limit %(limit)s;

-- name: callbacks
select o.execution_id, e.function, e.arn, o.op::text as op
from execution_operations o join executions e on e.id = o.execution_id
where o.tenant_id = %(tenant_id)s and o.type = 'CALLBACK' and o.status = 'STARTED' and e.ended_at is null
  and (%(execution_id)s::text is null or o.execution_id = %(execution_id)s)
order by o.started_at, o.id;

-- name: ready
-- What a worker may take, the most urgent first. Limits of functions and keys are looked at here and held by unique indexes.
select e.id, e.function, f.timeout_s, f.is_durable, f.concurrency, perdure_now() as now,
       coalesce((select array_agg(o.slot) from executions o
                 where o.tenant_id = e.tenant_id and o.function = e.function and o.slot is not null), '{}') as slots
from executions e
join unnest(%(functions)s::text[], %(digests)s::text[]) as w (function, digest) on w.function = e.function
join functions f on f.tenant_id = e.tenant_id and f.name = e.function
where e.tenant_id = %(tenant_id)s and e.reason = 'invoke' and e.invoke_at <= perdure_now()
  and (e.bound_digest is null or e.bound_digest = w.digest)
  and (e.key is null or not exists (select 1 from executions o
                                    where o.tenant_id = e.tenant_id and o.key = e.key and o.invocation is not null))
  and (f.concurrency is null or f.concurrency > (select count(*) from executions o
                                                 where o.tenant_id = e.tenant_id and o.function = e.function
                                                   and o.slot is not null))
order by e.priority desc, e.invoke_at, e.id
limit %(limit)s;

-- name: soonest
-- In how many seconds something of a worker's functions may be taken that cannot yet; null: nothing.
select extract(epoch from min(e.invoke_at) - perdure_now()) as wait_s
from executions e
where e.tenant_id = %(tenant_id)s and e.reason = 'invoke' and e.function = any(%(functions)s) and e.invoke_at > perdure_now();

-- name: beat
-- Keep the leases of a worker's invocations; those it has.
update executions e set lease_until = perdure_now() + make_interval(secs => %(lease_s)s)
from unnest(%(ids)s::text[], %(invocations)s::bigint[]) as f (id, invocation)
where e.id = f.id and e.invocation = f.invocation and e.worker_id = %(worker_id)s and e.tenant_id = %(tenant_id)s
  and e.ended_at is null
returning e.id, e.invocation;

-- name: is_durable
select f.is_durable from executions e join functions f on f.tenant_id = e.tenant_id and f.name = e.function
where e.tenant_id = %(tenant_id)s and e.id = %(id)s;

-- name: told
update executions set is_told = true where id = %(id)s;

-- name: register_function
insert into functions (tenant_id, name, digest, timeout_s, is_durable, concurrency)
values (%(tenant_id)s, %(name)s, %(digest)s, %(timeout_s)s, %(is_durable)s, %(concurrency)s)
on conflict (tenant_id, name) do update set
    digest = excluded.digest, timeout_s = excluded.timeout_s, is_durable = excluded.is_durable,
    concurrency = excluded.concurrency, registered_at = excluded.registered_at;

-- name: register_worker
insert into workers (id, tenant_id, name, state, functions, digests, lease_until)
values (%(id)s, %(tenant_id)s, %(name)s, 'up', %(functions)s, %(digests)s, perdure_now() + make_interval(secs => %(lease_s)s));

-- name: worker
select state, functions, digests, lease_until < perdure_now() + make_interval(secs => %(renew_s)s) as is_unseen
from workers where tenant_id = %(tenant_id)s and id = %(id)s;

-- name: worker_seen
update workers set lease_until = perdure_now() + make_interval(secs => %(lease_s)s)
where tenant_id = %(tenant_id)s and id = %(id)s and state = 'up';

-- name: worker_leaves
update workers set state = 'left', generation = generation + 1
where tenant_id = %(tenant_id)s and id = %(id)s and state = 'up';

-- name: forget_workers
-- Those that nobody has heard of for a day.
delete from workers where lease_until < perdure_now() - interval '1 day';

-- name: functions
select f.*, (select count(*) from workers w
             where w.tenant_id = f.tenant_id and w.state = 'up' and w.lease_until > perdure_now()
               and f.name = any(w.functions)) as workers,
       e.executions, e.waiting, e.waiting_since
from functions f, lateral (
    select count(*) as executions, count(*) filter (where reason = 'invoke' and invoke_at <= perdure_now()) as waiting,
           min(invoke_at) filter (where invoke_at <= perdure_now()) as waiting_since
    from executions where tenant_id = f.tenant_id and function = f.name and ended_at is null) e
where f.tenant_id = %(tenant_id)s order by f.name;

-- name: known_functions
select name from functions where tenant_id = %(tenant_id)s and name = any(%(names)s);

-- name: due
-- What is to be moved by the clock, and by ends that a parent has not been told of.
(select id, 'timer' as what, 0::bigint as invocation from executions where timer_at <= perdure_now() order by timer_at limit %(limit)s)
union all
(select id, 'lost', invocation from executions
 where invocation is not null and lease_until <= perdure_now() order by lease_until limit %(limit)s)
union all
(select id, 'timed-out', invocation from executions
 where deadline_at <= perdure_now() and lease_until > perdure_now() order by deadline_at limit %(limit)s)
union all
(select id, 'untold', 0 from executions where not is_told limit %(limit)s);

-- name: next_due
-- In how many seconds something is; null: nothing is, as things stand.
select extract(epoch from least(
    (select min(timer_at) from executions where timer_at is not null),
    (select min(lease_until) from executions where invocation is not null),
    (select min(deadline_at) from executions where deadline_at is not null)) - perdure_now()) as wait_s,
    perdure_now() as now;

-- name: unstarted
-- Chained invokes whose executions were never started, because a server died between its commit and that.
select o.execution_id as id from execution_operations o join executions e on e.id = o.execution_id
left join executions c on c.parent_id = o.execution_id and c.parent_operation = o.id
where o.type = 'CHAINED_INVOKE' and o.status = 'STARTED' and e.ended_at is null and c.id is null
  and o.started_at < perdure_now() - make_interval(secs => %(older_s)s)
group by o.execution_id limit %(limit)s;

-- name: deleting
-- Deleted ones of which there is still something to forget.
select id from executions e where status = 'DELETING' and invocation is null
  and exists (select 1 from execution_entries where execution_id = e.id and fact is not null)
limit %(limit)s;

-- name: expired
-- Executions that ended longer ago than they are kept, the oldest first. Not one that still has a function running, whose end its
-- parent was not told of, or whose parent goes on: the history of that leads to it.
select e.id from executions e left join executions p on p.id = e.parent_id
where e.ended_at < perdure_now() - make_interval(secs => %(keep_s)s) and e.status <> 'DELETING' and e.invocation is null and e.is_told
  and (p.id is null or p.ended_at is not null)
order by e.ended_at limit %(limit)s;

-- name: forget_data
-- What a deleted execution was given and what became of it, in its row.
update executions set started = %(started)s::json, head = %(head)s::json where id = %(id)s and status = 'DELETING';

-- name: forget_facts
update execution_entries set fact = null where execution_id = %(id)s and fact is not null;

-- name: forget_operations
delete from execution_operations where execution_id = %(id)s;

-- name: verified
-- Executions with all that their histories are compared with, in order of their ids.
select e.id, e.status, e.seq, e.reason, e.timer_at, e.head::text as head, e.hash,
       coalesce((select max(seq) from execution_entries n where n.execution_id = e.id), 0) as last,
       coalesce((select array_agg(o.op::text order by o.id) from execution_operations o where o.execution_id = e.id), '{}') as ops
from executions e where e.id > %(after)s order by e.id limit %(limit)s;

-- name: verified_one
select e.id, e.status, e.seq, e.reason, e.timer_at, e.head::text as head, e.hash,
       coalesce((select max(seq) from execution_entries n where n.execution_id = e.id), 0) as last,
       coalesce((select array_agg(o.op::text order by o.id) from execution_operations o where o.execution_id = e.id), '{}') as ops
from executions e where e.id = %(id)s;

-- name: links
select seq, at, kind, actor, digest, fact::text as fact, hash from execution_entries
where execution_id = %(id)s and seq > %(after)s and seq <= %(last)s order by seq limit %(limit)s;
