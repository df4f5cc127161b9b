-- Ports of workspaces that are reached without a key. Links are signed and kept nowhere: they name ``series``, a random number, and
-- count no more when the row is gone or another one stands in its place.
create table port_shares (
    workspace_id  text not null references workspaces (id),
    port          int not null check (port between 1 and 65535),
    tenant_id     text not null,
    series        bigint not null,
    is_public     boolean not null default false,
    links_until   timestamptz,               -- when the last link of the series ends; null: none was given out
    shared_at     timestamptz not null default perdure_now(),
    shared_by     text not null,
    primary key (workspace_id, port)
);
