-- Functions, as the worker that registered last describes them. ``concurrency``: invocations in flight at a time; null: no limit.
create table functions (
    tenant_id      text not null,
    name           text not null,
    digest         text not null,
    timeout_s      int not null check (timeout_s > 0),
    is_durable     boolean not null,
    concurrency    int check (concurrency > 0),
    registered_at  timestamptz not null default perdure_now(),
    primary key (tenant_id, name)
);

-- Each start of a worker is one of its own: whoever starts again has nothing that another had. ``functions`` and ``digests`` go
-- together.
create table workers (
    id             text primary key,
    tenant_id      text not null,
    name           text not null,
    state          text not null check (state in ('up', 'left')),
    generation     bigint not null default 1,
    functions      text[] not null,
    digests        text[] not null,
    lease_until    timestamptz not null,
    registered_at  timestamptz not null default perdure_now()
);
create index workers_tenant on workers (tenant_id, lease_until);

-- Executions. ``seq`` is that of the last entry of its history: whoever changes one names the seq it has decided on, and of two one
-- changes no row. ``reason`` is the one reason why it moves again; ``invoke_at`` stands with 'invoke', ``timer_at`` with any.
-- ``started`` and ``head`` are the engine's state but for its operations; ``hash`` ends the chain of its history.
create table executions (
    id                text primary key,
    tenant_id         text not null,
    function          text not null,
    name              text not null,
    arn               text not null,
    input_digest      bytea not null,
    status            text not null,
    seq               bigint not null check (seq >= 1),
    reason            text not null check (reason in ('ended', 'answer', 'operator', 'invoke', 'timer', 'world', 'stuck')),
    invoke_at         timestamptz check ((reason = 'invoke') = (invoke_at is not null)),
    timer_at          timestamptz,
    priority          int not null,
    key               text,
    bound_digest      text,                   -- the only code that may run it
    invocation        bigint,                 -- in flight, and whose; also after an end, until it is over
    worker_id         text,
    slot              int,                    -- of its function's concurrency
    lease_until       timestamptz,
    deadline_at       timestamptz,            -- when its function's timeout is over
    parent_id         text,                   -- the execution whose chained invoke it is
    parent_operation  text,
    is_told           boolean not null default true,  -- false: its end, to its parent
    started           json not null,
    head              json not null,
    hash              text not null,
    started_at        timestamptz not null,
    ended_at          timestamptz,
    check ((invocation is null) = (worker_id is null) and (invocation is null) = (lease_until is null))
) with (fillfactor = 50);  -- room in the page for the next version of a row whose indexed columns stay as they are
create unique index executions_name on executions (tenant_id, function, name) where status <> 'DELETING';
create index executions_deleting on executions (id) where status = 'DELETING';
create unique index executions_child on executions (parent_id, parent_operation) where parent_id is not null;
create index executions_ready on executions (tenant_id, function, priority desc, invoke_at) where reason = 'invoke';
create index executions_running on executions (tenant_id, function) where ended_at is null;
create index executions_timer on executions (timer_at) where timer_at is not null;
create index executions_lease on executions (lease_until) where invocation is not null;
create index executions_deadline on executions (deadline_at) where deadline_at is not null;
create index executions_untold on executions (id) where not is_told;
create index executions_listed on executions (tenant_id, started_at, id);
-- One invocation at a time with a key, and one in each slot of a function.
create unique index executions_key on executions (tenant_id, key) where key is not null and invocation is not null;
create unique index executions_slot on executions (tenant_id, function, slot) where slot is not null;

-- Operations as the engine has them. What others ask for is copied out: the text may hold \u0000, which PostgreSQL stores and does
-- not look into.
create table execution_operations (
    tenant_id     text not null,
    execution_id  text not null,
    id            text not null,
    position      int not null,
    type          text not null,
    status        text not null,
    started_at    timestamptz not null,
    op            json not null,
    primary key (execution_id, id)
);
create index execution_operations_callbacks on execution_operations (tenant_id, execution_id)
    where type = 'CALLBACK' and status = 'STARTED';
create index execution_operations_invokes on execution_operations (execution_id, id)
    where type = 'CHAINED_INVOKE' and status = 'STARTED';

-- Histories: append-only, hash-chained per execution. The chain holds the digest of a fact, not the fact, so that it still holds
-- when the facts of an execution that was deleted are gone.
create table execution_entries (
    tenant_id     text not null,
    execution_id  text not null,
    seq           bigint not null check (seq >= 1),
    at            timestamptz not null,
    kind          text not null,
    actor         text not null,
    digest        text not null,
    fact          json,
    hash          text not null,
    primary key (execution_id, seq)
);
create function execution_entries_are_append_only() returns trigger language plpgsql as $$
begin
    if tg_op = 'UPDATE' and new.fact is null
       and (new.tenant_id, new.execution_id, new.seq, new.at, new.kind, new.actor, new.digest, new.hash)
         = (old.tenant_id, old.execution_id, old.seq, old.at, old.kind, old.actor, old.digest, old.hash)
       and exists (select 1 from executions where id = old.execution_id and status = 'DELETING') then
        return new;
    end if;
    raise exception 'the history of an execution is append-only' using errcode = 'integrity_constraint_violation';
end $$;
create trigger execution_entries_append_only before update or delete on execution_entries
    for each row execute function execution_entries_are_append_only();
create trigger execution_entries_no_truncate before truncate on execution_entries
    for each statement execute function execution_entries_are_append_only();
