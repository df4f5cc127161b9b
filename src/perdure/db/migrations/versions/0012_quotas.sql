-- Limits of a tenant; null, and no row: none. Whoever adds to what a tenant has locks its row first.
create table tenant_quotas (
    tenant_id         text primary key,
    workspaces        bigint check (workspaces >= 0),
    memory_awake_mib  bigint check (memory_awake_mib >= 0),
    storage_gib       double precision check (storage_gib >= 0),
    execs             bigint check (execs >= 0),
    changed_at        timestamptz not null default perdure_now(),
    changed_by        text not null
);
create index stored_spans_tenant on stored_spans (tenant_id) where to_at is null;

-- Who did what, and what was refused to whom. ``target`` is the id of what it was about, where that is known: what became of a
-- workspace is in its thread. ``repeated`` counts calls that one row stands for.
create table audit (
    seq         bigint generated always as identity primary key,
    tenant_id   text not null,
    at          timestamptz not null default perdure_now(),
    principal   text not null,                 -- empty: nobody knows
    route       text not null,
    target      text not null,
    outcome     text not null,                 -- ok, interrupted, or the code of an error
    status      int not null,
    request_id  text not null,
    peer        text not null,
    repeated    bigint not null check (repeated > 0),
    check (length(principal) <= 100 and length(route) <= 100 and length(target) <= 300 and length(outcome) <= 100
           and length(request_id) <= 100 and length(peer) <= 100)
);
create index audit_tenant on audit (tenant_id, seq);
create index audit_at on audit (at);

-- Calls that are under way: written before they change anything, so that nothing is done of which there is no row, even if the
-- server ends in the middle. ``server`` is whose they are.
create table audit_begun (
    id          text primary key,
    request_id  text not null,
    tenant_id   text not null,
    server      text not null,
    begun_at    timestamptz not null default perdure_now(),
    principal   text not null,
    route       text not null,
    target      text not null,
    peer        text not null
);

create function audit_lock() returns bigint language sql immutable as $$ select 7262646173 $$;

-- The only way to write a row. Its lock, which others that write may hold too, lets a reader wait for numbers that are given and not
-- committed yet. Not ``durable``: the last rows before a crash of the database may be missing, and the commit does not wait for the disk.
create function audit_append(
    whose text, who text, what text, about text, how text, code int, request text, from_where text, calls bigint, durable boolean
) returns bigint language plpgsql as $$
declare
    number bigint;
begin
    perform pg_advisory_xact_lock_shared(audit_lock());
    if not durable then
        perform set_config('synchronous_commit', 'off', true);
    end if;
    insert into audit (tenant_id, principal, route, target, outcome, status, request_id, peer, repeated)
    values (whose, left(who, 100), left(what, 100), left(about, 300), left(how, 100), code, left(request, 100),
            left(from_where, 100), calls)
    returning seq into number;
    return number;
end $$;

create function audit_is_append_only() returns trigger language plpgsql as $$
begin
    if tg_op = 'DELETE' and old.at < perdure_now() - interval '1 day' then
        return old;
    end if;
    raise exception 'the audit is append-only' using errcode = 'integrity_constraint_violation';
end $$;
create trigger audit_append_only before update or delete on audit for each row execute function audit_is_append_only();
create trigger audit_no_truncate before truncate on audit for each statement execute function audit_is_append_only();
