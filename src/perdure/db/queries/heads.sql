-- name: ensure
insert into history_heads (tenant_id, installation, kind, id, seq, hash, at)
select 'ten_default', id, 'signing', '', 0, '', '-infinity' from installation
on conflict do nothing;

-- name: turn
-- The last signing, locked if nobody else is about to sign.
select h.installation, h.seq as number, h.hash as digest, perdure_now() as now,
       h.at <= perdure_now() - make_interval(secs => %(every_s)s) as is_due
from history_heads h join installation i on i.id = h.installation
where h.kind = 'signing'
for update of h skip locked;

-- name: installation
select id from installation;

-- name: changed
-- Chains that have grown since they were signed.
select 'execution' as kind, e.id, e.tenant_id, e.seq, e.hash
from executions e left join history_heads h on h.installation = %(installation)s and h.kind = 'execution' and h.id = e.id
where e.seq > coalesce(h.seq, 0)
union all
select 'workspace', j.workspace_id, j.tenant_id, j.seq, j.hash
from (select distinct on (workspace_id) workspace_id, tenant_id, seq, hash from journal order by workspace_id, seq desc) j
left join history_heads h on h.installation = %(installation)s and h.kind = 'workspace' and h.id = j.workspace_id
where j.seq > coalesce(h.seq, 0)
order by 1, 2
limit %(limit)s;

-- name: signed
-- ``heads`` is a JSON array of what was signed.
insert into history_heads (tenant_id, installation, kind, id, seq, hash, at)
select tenant_id, %(installation)s, kind, id, seq, hash, perdure_now()
from json_to_recordset(%(heads)s::json) as c (tenant_id text, kind text, id text, seq bigint, hash text)
on conflict (installation, kind, id) do update set seq = excluded.seq, hash = excluded.hash, at = excluded.at;

-- name: advance
update history_heads set seq = %(number)s, hash = %(digest)s, at = perdure_now()
where installation = %(installation)s and kind = 'signing';

-- name: unsign
-- All of it, to sign anew.
delete from history_heads where installation = %(installation)s and kind <> 'signing';
