-- One row: the name by which an object store knows its owner. It comes back with a restored database, and a new one has another.
create table installation (
    id          text primary key,
    tenant_id   text not null default 'ten_default',
    only_one    boolean not null unique default true check (only_one),
    created_at  timestamptz not null default perdure_now()
);
insert into installation (id) values ('ins_' || replace(gen_random_uuid()::text, '-', ''));
