-- Named in the next ResumeReport: the branches that hold what the workspace was before a rewind or a promotion.
alter table workspaces add column kept_branch text;
create index workspaces_parent on workspaces (parent_id) where parent_id is not null;

-- The workspace that ran when a snapshot was taken. ``workspace_id``, whose history it is part of, changes when a branch is promoted.
alter table snapshots add column origin_id text;
update snapshots s set origin_id = coalesce(
    (select w.parent_id from workspaces w where w.id = s.workspace_id and w.kind = 'lost' and s.reason = 'salvaged'),
    s.workspace_id);
alter table snapshots alter column origin_id set not null;
