-- name: workspaces
-- Those of a tenant, deleted ones included; by id or by a name that any of them had.
select id from workspaces
where tenant_id = %(tenant_id)s and (%(ref)s::text is null or id = %(ref)s or name = %(ref)s)
order by created_at, id;

-- name: of
-- What each of these used between two instants (null: no bound; an open interval ends now). Seconds and bytes. A reading counts at
-- the instant of its entry, for what came before that, by what it is more than earlier ones of the same counter.
with times as (
    select perdure_now() as now, coalesce(%(since)s::timestamptz, '-infinity') as since,
           coalesce(%(until)s::timestamptz, 'infinity') as until
), lives as (
    select i.workspace_id, i.phase, i.is_lost and i.to_at > t.since and i.to_at <= t.until as is_lost,
           greatest(i.from_at, t.since) as from_at, least(coalesce(i.to_at, greatest(i.from_at, t.now)), t.until) as to_at
    from lifecycle_intervals i, times t where i.workspace_id = any(%(ids)s::text[])
), phases as (
    select workspace_id, count(*) filter (where is_lost) as losses,
           coalesce(sum(to_at - from_at) filter (where phase = 'awake' and to_at > from_at), '0') as awake,
           coalesce(sum(to_at - from_at) filter (where phase = 'paused' and to_at > from_at), '0') as paused,
           coalesce(sum(to_at - from_at) filter (where phase = 'asleep' and to_at > from_at), '0') as asleep
    from lives group by workspace_id
), entries as materialized (
    select j.workspace_id, j.seq, j.at, r.*,
           case when j.kind = 'running' then coalesce((j.body->'report'->>'fetched_bytes')::bigint, 0) else 0 end as fetched_bytes
    from journal j left join lateral json_to_record(j.body->'spent') as r (
        generation bigint, cpu_s double precision, counter text, sent_bytes bigint, received_bytes bigint,
        request_bytes bigint, answer_bytes bigint) on true
    where j.workspace_id = any(%(ids)s::text[]) and j.kind not in ('detail', 'keep-awake')
), readings as (
    select workspace_id, at, fetched_bytes,
           greatest(0, cpu_s - coalesce(max(cpu_s) over (machine rows between unbounded preceding and 1 preceding), 0)) as cpu_s,
           greatest(0, sent_bytes - coalesce(max(sent_bytes) over (counts rows between unbounded preceding and 1 preceding), 0))
               as sent_bytes,
           greatest(0, received_bytes
                       - coalesce(max(received_bytes) over (counts rows between unbounded preceding and 1 preceding), 0))
               as received_bytes,
           greatest(0, request_bytes
                       - coalesce(max(request_bytes) over (link rows between unbounded preceding and 1 preceding), 0))
               as request_bytes,
           greatest(0, answer_bytes - coalesce(max(answer_bytes) over (link rows between unbounded preceding and 1 preceding), 0))
               as answer_bytes
    from entries
    window machine as (partition by workspace_id, generation order by seq),
           counts as (partition by workspace_id, counter order by seq),
           link as (partition by workspace_id, generation, counter order by seq)
), spent as (
    select workspace_id, coalesce(sum(cpu_s), 0) as cpu_s, coalesce(sum(sent_bytes), 0) as sent_bytes,
           coalesce(sum(received_bytes), 0) as received_bytes, coalesce(sum(request_bytes), 0) as request_bytes,
           coalesce(sum(answer_bytes), 0) as answer_bytes, coalesce(sum(fetched_bytes), 0) as fetched_bytes
    from readings, times t where at > t.since and at <= t.until group by workspace_id
), stored as (
    select s.workspace_id, coalesce(sum(s.uploaded_bytes) filter (where s.from_at >= t.since and s.from_at < t.until), 0) as uploaded_bytes,
           sum(case when s.place = 'node' then s.bytes * long.seconds else 0 end) as local_byte_s,
           sum(case when s.place = 'store' then s.bytes * long.seconds else 0 end) as store_byte_s
    from stored_spans s, times t, lateral (
        select greatest(0, extract(epoch from least(coalesce(s.to_at, greatest(s.from_at, t.now)), t.until)
                                              - greatest(s.from_at, t.since))) as seconds) long
    where s.workspace_id = any(%(ids)s::text[]) group by s.workspace_id
)
select w.id, w.name, w.state, coalesce(p.losses, 0)::bigint as losses,
       coalesce(p.awake, '0') as awake, coalesce(p.paused, '0') as paused, coalesce(p.asleep, '0') as asleep,
       (w.memory_mib * 1048576.0 * extract(epoch from coalesce(p.awake + p.paused, '0')))::double precision as memory_byte_s,
       coalesce(s.cpu_s, 0)::double precision as cpu_s, coalesce(d.local_byte_s, 0)::double precision as local_byte_s,
       coalesce(d.store_byte_s, 0)::double precision as store_byte_s, coalesce(s.sent_bytes, 0)::bigint as sent_bytes,
       coalesce(s.received_bytes, 0)::bigint as received_bytes, coalesce(s.request_bytes, 0)::bigint as request_bytes,
       coalesce(s.answer_bytes, 0)::bigint as answer_bytes, coalesce(d.uploaded_bytes, 0)::bigint as uploaded_bytes,
       coalesce(s.fetched_bytes, 0)::bigint as fetched_bytes
from workspaces w left join phases p on p.workspace_id = w.id left join spent s on s.workspace_id = w.id
     left join stored d on d.workspace_id = w.id
where w.id = any(%(ids)s::text[])
order by w.created_at, w.id;
