-- Of the snapshots that nobody asked for, how many of the newest stay; null follows the server's setting.
alter table workspaces add column keep_snapshots int check (keep_snapshots >= 0);

-- Whatever needs a snapshot and is not a workspace: ``kind`` and ``holder`` say who, as in 'execution', 'exe_01k…'. Retention and
-- removal leave the snapshot alone while there is a row. No foreign key: the row may be written before the snapshot is complete.
create table snapshot_references (
    tenant_id    text not null,
    snapshot_id  text not null,
    kind         text not null,
    holder       text not null,
    created_at   timestamptz not null default perdure_now(),
    primary key (snapshot_id, kind, holder)
);

-- Until now a parent could be removed from above its children. From here on they are hung on the next ancestor; those that hang
-- on nothing already are hung on what their workspace took before them.
update snapshots s
set parent_id = (select p.id from snapshots p
                 where p.workspace_id = s.workspace_id and p.state = 'complete' and (p.created_at, p.id) < (s.created_at, s.id)
                 order by p.created_at desc, p.id desc limit 1)
where s.parent_id is not null and not exists (select 1 from snapshots p where p.id = s.parent_id);
create index snapshots_parent on snapshots (parent_id) where parent_id is not null;
