-- When a workspace is to wake by itself, once.
alter table workspaces add column wake_at timestamptz;
create index workspaces_wake_at on workspaces (node_id, wake_at) where wake_at is not null;

-- What becomes of it when it has been asleep for so many days. ``asleep_noted`` is the generation in whose sleep it was archived, or
-- its deletion announced, at ``asleep_noted_at``.
alter table workspaces add column asleep_after_days double precision check (asleep_after_days >= 1);
alter table workspaces add column asleep_action text not null default 'keep' check (asleep_action in ('keep', 'archive', 'delete'));
alter table workspaces add column asleep_noted bigint;
alter table workspaces add column asleep_noted_at timestamptz;
alter table workspaces add constraint workspaces_asleep check ((asleep_action = 'keep') = (asleep_after_days is null));
create index workspaces_long_sleep on workspaces (node_id, id) where asleep_action <> 'keep' and state = 'hibernated';
