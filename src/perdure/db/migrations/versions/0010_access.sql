-- Tenants. Nothing refers to them by a foreign key: a catalogue made from an object store knows ids before anybody gives them names.
create table tenants (
    tenant_id   text primary key,
    name        text not null unique,
    created_at  timestamptz not null default perdure_now(),
    created_by  text not null
);
insert into tenants (tenant_id, name, created_by) values ('ten_default', 'default', 'installation');

-- API keys. ``hash`` is the SHA-256 of the whole key: its secret is 256 random bits, so there is nothing to guess that a slow hash or a
-- salt would protect, and every request would pay for it. ``prefix`` is how people tell keys apart. Rows stay: they say who had access.
create table api_keys (
    id            text primary key,
    tenant_id     text not null references tenants (tenant_id),
    name          text not null,
    hash          bytea not null unique check (length(hash) = 32),
    prefix        text not null,
    scopes        text[] not null check (cardinality(scopes) > 0
                                         and scopes <@ array['admin', 'operate', 'invoke', 'approve', 'read']),
    created_at    timestamptz not null default perdure_now(),
    created_by    text not null,
    expires_at    timestamptz,
    last_used_at  timestamptz,               -- to within ten minutes
    revoked_at    timestamptz,
    revoked_by    text,
    check ((revoked_at is null) = (revoked_by is null))
);
-- A name is free again as soon as its key is revoked.
create unique index api_keys_name on api_keys (tenant_id, name) where revoked_at is null;
