-- A list of workspaces is read page by page in the order of their births, and asked for by what they are labelled with.
create index workspaces_page on workspaces (tenant_id, created_at, id) where state <> 'deleted';
create index workspaces_metadata on workspaces using gin (metadata jsonb_path_ops) where state <> 'deleted';

-- What the caller called the request that made a workspace: the same request makes nothing again while the workspace is there.
alter table workspaces add column request_key text;
create unique index workspaces_request_key on workspaces (tenant_id, request_key) where state <> 'deleted';
