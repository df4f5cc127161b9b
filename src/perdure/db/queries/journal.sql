-- name: append
-- One entry that stands alone. Locking the workspace's row serialises its chain.
with locked as (select tenant_id, id from workspaces where id = %(workspace_id)s for update)
select journal_append(tenant_id, id, %(kind)s, %(generation)s, %(body)s) as seq from locked;

-- name: read
-- One tenant's view of one workspace's thread, oldest first.
select seq, at, kind, generation, body::text as body, hash
from journal
where tenant_id = %(tenant_id)s and workspace_id = %(workspace_id)s and seq > %(after_seq)s
order by seq
limit %(limit)s;

-- name: links
-- What the chain is verified from: body as the exact text that was hashed.
select tenant_id, workspace_id, seq, at, kind, generation, body::text as body, hash
from journal
where workspace_id = %(workspace_id)s and seq > %(after_seq)s
order by seq
limit %(limit)s;

-- name: workspaces
-- Every chain there is.
select distinct workspace_id from journal order by workspace_id;
