-- Time. Everything that asks the database for the time asks perdure_now(); tests shift it per transaction.
create function perdure_now() returns timestamptz
language sql stable parallel safe as $$
    select clock_timestamp() + coalesce(nullif(current_setting('perdure.clock_offset', true), ''), '0')::interval
$$;

-- Machines that run workspaces, and their leases (DESIGN D11). ``generation`` grows with every registration: a node process
-- that was taken over cannot renew.
create table nodes (
    id           text primary key,
    tenant_id    text not null,
    state        text not null check (state in ('up', 'down')),
    generation   bigint not null default 1,
    lease_until  timestamptz not null,
    created_at   timestamptz not null default perdure_now(),
    seen_at      timestamptz not null default perdure_now()
);

create table workspaces (
    id                     text primary key,
    tenant_id              text not null,
    name                   text not null,
    kind                   text not null check (kind in ('workspace', 'branch', 'lost')),
    state                  text not null check (state in
                               ('creating', 'running', 'hibernating', 'hibernated', 'waking', 'failed', 'deleted')),
    state_detail           text not null default '',
    generation             bigint not null check (generation >= 1),
    node_id                text not null references nodes (id),
    image                  text not null,
    image_name             text not null,
    memory_mib             int not null,
    vcpus                  int not null,
    disk_gib               int not null,                 -- wanted; the next disk boot makes it so
    head_snapshot_id       text,
    parent_id              text references workspaces (id),
    forked_from            text,
    hostname               text not null,
    machine_id             text not null,
    idle_timeout_s         double precision not null check (idle_timeout_s >= 0),
    checkpoint_interval_s  double precision not null check (checkpoint_interval_s >= 0),
    egress_allow           text[] not null default '{}',
    environment            jsonb not null default '{}',
    metadata               jsonb not null default '{}',
    confinement            jsonb,
    keep_awake_until       timestamptz,
    lost_branch            text,                          -- named in the next ResumeReport
    rewound                text not null default '',      -- why memory is older than it was when the machine was lost
    last_report            jsonb,
    created_at             timestamptz not null default perdure_now(),
    state_changed_at       timestamptz not null default perdure_now(),
    last_active_at         timestamptz not null default perdure_now(),
    expires_at             timestamptz
);
-- A name is free again as soon as its workspace is deleted.
create unique index workspaces_name on workspaces (tenant_id, name) where state <> 'deleted';
create index workspaces_unsettled on workspaces (node_id, state) where state not in ('hibernated', 'deleted');
create index workspaces_expiry on workspaces (expires_at) where expires_at is not null and state <> 'deleted';
create index workspaces_fork on workspaces (forked_from) where forked_from is not null and state <> 'deleted';
create index workspaces_head on workspaces (head_snapshot_id) where head_snapshot_id is not null and state <> 'deleted';

-- Snapshots. 'pending' is written before the node is asked, 'deleting' before the node is asked to delete.
create table snapshots (
    id                  text primary key,
    tenant_id           text not null,
    workspace_id        text not null references workspaces (id),
    node_id             text not null references nodes (id),
    state               text not null check (state in ('pending', 'complete', 'deleting')),
    parent_id           text,
    name                text,
    reason              text not null check (reason in ('requested', 'automatic', 'hibernate', 'fork', 'salvaged')),
    generation          bigint not null,
    image               text,
    memory_mib          int,
    vcpus               int,
    disk_gib            int,
    has_memory          boolean not null default false,
    quiesced            boolean not null default false,
    pages               bigint not null default 0,
    memory_bytes        bigint not null default 0,
    memory_total_bytes  bigint not null default 0,
    disk_bytes          bigint not null default 0,
    disk_total_bytes    bigint not null default 0,
    device_bytes        bigint not null default 0,
    pause_s             double precision not null default 0,
    fingerprint         text not null default '',
    created_at          timestamptz not null default perdure_now()
);
create unique index snapshots_name on snapshots (workspace_id, name) where name is not null and state <> 'deleting';
create index snapshots_workspace on snapshots (workspace_id, created_at);
create index snapshots_unsettled on snapshots (node_id) where state <> 'complete';

-- The journal: append-only, hash-chained per workspace. ``body`` is json, not jsonb, because its exact text is hashed.
create table journal (
    tenant_id     text not null,
    workspace_id  text not null,
    seq           bigint not null check (seq >= 1),
    at            timestamptz not null,
    kind          text not null,
    generation    bigint not null,
    body          json not null,
    hash          text not null,
    primary key (workspace_id, seq)
);

create function journal_is_append_only() returns trigger language plpgsql as $$
begin
    raise exception 'the journal is append-only' using errcode = 'integrity_constraint_violation';
end $$;
create trigger journal_append_only before update or delete on journal for each row execute function journal_is_append_only();
create trigger journal_no_truncate before truncate on journal for each statement execute function journal_is_append_only();

-- Append one entry. The caller holds the workspace's row lock (it calls this in the RETURNING of the update that the entry
-- tells about), so the chain grows one entry at a time; the primary key refuses a second successor all the same.
-- The hash is sha256 over the lines: previous hash ('' for the first), tenant, workspace, seq, microseconds since 1970, kind,
-- generation, body; joined by newlines. perdure.journal.chain computes the same.
create function journal_append(tenant text, workspace text, entry_kind text, entry_generation bigint, entry_body text)
returns bigint language plpgsql as $$
declare
    previous journal%rowtype;
    entry_seq bigint;
    entry_at timestamptz;
begin
    select * into previous from journal where workspace_id = workspace order by seq desc limit 1;
    entry_seq := coalesce(previous.seq, 0) + 1;
    entry_at := greatest(perdure_now(), previous.at);
    insert into journal (tenant_id, workspace_id, seq, at, kind, generation, body, hash)
    values (tenant, workspace, entry_seq, entry_at, entry_kind, entry_generation, entry_body::json, encode(sha256(convert_to(
        concat_ws(E'\n', coalesce(previous.hash, ''), tenant, workspace, entry_seq,
                  (extract(epoch from entry_at) * 1000000)::bigint, entry_kind, entry_generation, entry_body), 'UTF8')), 'hex'));
    return entry_seq;
end $$;
