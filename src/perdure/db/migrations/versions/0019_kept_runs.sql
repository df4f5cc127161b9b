-- Executions that have ended, by when: what is not kept any longer is found without a look at all others.
create index executions_ended on executions (ended_at) where ended_at is not null and status <> 'DELETING';

-- What was signed last of the chain of each workspace and execution, in this life of the installation; and a row of the kind
-- 'signing' with the number of the last object that has signed heads, its digest and when that was.
create table history_heads (
    tenant_id     text not null,
    installation  text not null,
    kind          text not null check (kind in ('workspace', 'execution', 'signing')),
    id            text not null,
    seq           bigint not null,
    hash          text not null,
    at            timestamptz not null,
    primary key (installation, kind, id)
);
