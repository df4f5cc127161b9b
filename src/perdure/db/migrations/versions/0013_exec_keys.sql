-- Idempotency keys of commands. The row is written before the command is started and outlives everything that may happen to the
-- workspace, a rewind and the loss of its memory included, so that a start that is asked for again is never a second run.
-- ``generation`` is the workspace's when the key was first used; ``digest`` tells the same command from another one.
create table exec_keys (
    tenant_id     text not null,
    workspace_id  text not null references workspaces (id),
    key           text not null,
    exec_id       text not null,
    digest        bytea not null,
    generation    bigint not null,
    created_at    timestamptz not null default perdure_now(),
    primary key (workspace_id, key)
);
create index exec_keys_age on exec_keys (created_at);
