-- What the object store holds (wire/objects.py says what the rows mean). A scope is a tenant, or 'images', which all share.
-- Whoever changes anything of a scope locks its row first, so that what one transaction decides is still so when it ends.
create table store_scopes (
    scope      text primary key,
    tenant_id  text not null,
    epoch      bigint not null default 0,   -- of the garbage collection
    attempts   bigint not null default 0    -- the newest one of any item; grows with the clock too, so that none comes twice
);

-- ``generation`` is the attempt: an upload that another one has followed can change nothing.
create table store_items (
    scope        text not null references store_scopes (scope),
    name         text not null,
    tenant_id    text not null,
    state        text not null check (state in ('uploading', 'durable', 'released')),
    generation   bigint not null,
    size         bigint not null default 0,   -- of the manifest, in bytes
    checksum     text,
    heard_epoch  bigint not null,             -- in which the upload last gave a sign of life
    created_at   timestamptz not null default perdure_now(),
    durable_at   timestamptz,
    primary key (scope, name),
    check (state <> 'durable' or checksum is not null)
);

create table store_needs (
    scope       text not null,
    name        text not null,
    need_scope  text not null,
    need_name   text not null,
    tenant_id   text not null,
    primary key (scope, name, need_scope, need_name),
    foreign key (scope, name) references store_items (scope, name) on delete cascade,
    foreign key (need_scope, need_name) references store_items (scope, name)
);
create index store_needs_needed on store_needs (need_scope, need_name);

-- ``generation`` is the attempt that made the pack. ``whole`` once its object was seen to be there.
create table store_packs (
    id               text primary key,
    scope            text not null references store_scopes (scope),
    tenant_id        text not null,
    state            text not null check (state in ('pending', 'stored', 'condemned', 'deleting')),
    generation       bigint not null,
    whole            boolean not null default false,
    size             bigint not null check (size > 0),
    index_bytes      bigint not null check (index_bytes > 0),
    condemned_epoch  bigint,
    created_at       timestamptz not null default perdure_now(),
    check (state <> 'stored' or whole)
);
create index store_packs_scope on store_packs (scope, state);

-- An item holds a pack; of an upload that is under way the same row is a pin.
create table store_holds (
    scope      text not null,
    name       text not null,
    pack_id    text not null references store_packs (id),
    tenant_id  text not null,
    primary key (scope, name, pack_id),
    foreign key (scope, name) references store_items (scope, name) on delete cascade
);
create index store_holds_pack on store_holds (pack_id);

-- Objects that were listed and that no row accounts for, with the epoch in which that was first so.
create table store_strays (
    scope        text not null references store_scopes (scope),
    name         text not null,
    tenant_id    text not null,
    first_epoch  bigint not null,
    primary key (scope, name)
);
