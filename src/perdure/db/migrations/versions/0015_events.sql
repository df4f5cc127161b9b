-- The feed: the entries of a tenant's threads in one order, numbered 1, 2, 3 … without a hole. A number is given after the entry is
-- committed, by one numbering at a time, so whoever has read number n will never see a smaller one appear.
create table events (
    tenant_id     text not null,
    seq           bigint not null check (seq >= 1),
    workspace_id  text not null,
    entry_seq     bigint not null,
    primary key (tenant_id, seq)
);
create unique index events_entry on events (workspace_id, entry_seq);
create table event_heads (
    tenant_id  text primary key,
    seq        bigint not null
);

-- Entries that have no number yet: written with the entry, so that none is forgotten.
create table event_inbox (
    tenant_id     text not null,
    workspace_id  text not null,
    entry_seq     bigint not null,
    at            timestamptz not null,
    primary key (workspace_id, entry_seq)
);
create function journal_to_inbox() returns trigger language plpgsql as $$
begin
    insert into event_inbox (tenant_id, workspace_id, entry_seq, at) values (new.tenant_id, new.workspace_id, new.seq, new.at);
    return null;
end $$;
create trigger journal_to_inbox after insert on journal for each row execute function journal_to_inbox();

-- What is there already comes first.
insert into events (tenant_id, seq, workspace_id, entry_seq)
select tenant_id, row_number() over (partition by tenant_id order by at, workspace_id, seq), workspace_id, seq from journal;
insert into event_heads (tenant_id, seq) select tenant_id, max(seq) from events group by tenant_id;

-- Where a tenant's events are sent to. ``kinds``: which; none: all. The secret that signs is derived from the master key and the id.
-- ``failing``: an event was given up, and none has been delivered since.
create table webhooks (
    id            text primary key,
    tenant_id     text not null,
    url           text not null,
    kinds         text[] not null default '{}',
    state         text not null default 'active' check (state in ('active', 'failing')),
    generation    bigint not null default 1,
    created_at    timestamptz not null default perdure_now(),
    created_by    text not null,
    delivered     bigint not null default 0,
    delivered_at  timestamptz,
    failed_at     timestamptz,                 -- the last attempt that failed
    last_error    text not null default ''     -- of it; '' when one has succeeded since
);
create index webhooks_tenant on webhooks (tenant_id);

-- What is still to be delivered, and what was given up. One that was delivered is no row any more. ``generation`` grows with every
-- attempt: the outcome of an attempt whose lease was over changes nothing.
create table webhook_deliveries (
    webhook_id  text not null references webhooks (id) on delete cascade,
    tenant_id   text not null,
    event_seq   bigint not null,
    state       text not null default 'pending' check (state in ('pending', 'failed')),
    generation  bigint not null default 1,
    attempts    int not null default 0,
    first_at    timestamptz,                   -- of the first attempt
    due_at      timestamptz not null,          -- during an attempt: when another server may take it for dead
    last_error  text not null default '',
    primary key (webhook_id, event_seq)
);
create index webhook_deliveries_due on webhook_deliveries (due_at, event_seq) where state = 'pending';
