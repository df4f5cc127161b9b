-- Tenants whose key in the object store is thrown away. The row is written before the key goes; it stays, so that every node of the
-- installation throws its copy away and nothing of the tenant is uploaded again. The tenant's thread is in the journal under its own
-- id, and ``generation`` grows with each time that it is asked for.
create table tenant_shreds (
    tenant_id   text primary key,
    state       text not null check (state in ('asked', 'done')),
    generation  bigint not null default 1,
    asked_at    timestamptz not null default perdure_now(),
    done_at     timestamptz
);
