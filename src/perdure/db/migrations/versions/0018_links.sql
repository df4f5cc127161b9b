-- Share links that count, each under the id that its token names: taking one back removes its row. The token is in none of them.
-- Tokens that were given out before this name no link, and count as long as their series.
create table port_links (
    id            text primary key,
    tenant_id     text not null,
    workspace_id  text not null,
    port          int not null,
    until         timestamptz not null,
    made_at       timestamptz not null default perdure_now(),
    made_by       text not null,
    foreign key (workspace_id, port) references port_shares (workspace_id, port) on delete cascade
);
create index port_links_port on port_links (workspace_id, port, made_at, id);
