-- When a node's machines were last known to be as the rows say: renewed with its lease, once the process that holds the lease has
-- compared rows and machines (``compared_generation`` is the registration that has). A machine found dead ran until then at most.
alter table nodes add column machines_at timestamptz;
alter table nodes add column compared_generation bigint not null default 0;
update nodes set machines_at = seen_at;

-- Every instant between a workspace's first entry and its deletion is in one interval of it. They are read from the journal, whose
-- entries are written by the statements that change the state, whose times never go back, and of which nothing is ever removed.
-- ``to_at`` is null as long as it lasts. A machine that was found dead ran until the instant in the entry's ``alive_until``: its
-- interval ends there and is marked, and what follows up to the entry was spent asleep.
create view lifecycle_intervals as
with steps as (
    select tenant_id, workspace_id, seq, at, (body->>'alive_until')::timestamptz as alive_until,
           case when kind = 'detail' then case when (body->>'paused')::boolean then 'paused' else 'awake' end
                when kind in ('creating', 'waking', 'running', 'hibernating') then 'awake'
                when kind <> 'deleted' then 'asleep' end as phase
    from journal
    where kind in ('creating', 'waking', 'running', 'hibernating', 'hibernated', 'failed', 'deleted', 'restored', 'recovered')
       or (kind = 'detail' and body->>'paused' is not null)
), spans as (
    select tenant_id, workspace_id, phase, at, lead(at) over thread as next_at, lead(alive_until) over thread as alive_until
    from steps window thread as (partition by workspace_id order by seq)
), ended as (
    select *, alive_until is not null and phase <> 'asleep' as is_lost,
           case when alive_until is null or phase = 'asleep' then next_at else greatest(at, least(alive_until, next_at)) end as ended_at
    from spans
)
select e.tenant_id, e.workspace_id, part.phase, part.from_at, part.to_at, part.is_lost
from ended e cross join lateral (values (e.phase, e.at, e.ended_at, e.is_lost), ('asleep', e.ended_at, e.next_at, false))
     as part (phase, from_at, to_at, is_lost)
where e.phase is not null
  and (part.to_at > part.from_at or part.is_lost or (part.to_at is null and part.from_at is not null));

-- What is stored, from when to when: of a snapshot on its node, of a pack in the object store. Kept for good, since the rows of
-- snapshots and packs go. At most one span of an object is open, so whatever is told twice changes nothing.
create table stored_spans (
    id              bigint generated always as identity primary key,
    tenant_id       text not null,
    workspace_id    text not null,
    object_id       text not null,
    place           text not null check (place in ('node', 'store')),
    bytes           bigint not null check (bytes >= 0),
    uploaded_bytes  bigint not null default 0,   -- sent to the store when the span began
    from_at         timestamptz not null default perdure_now(),
    to_at           timestamptz check (to_at >= from_at)
);
create unique index stored_spans_open on stored_spans (object_id) where to_at is null;
create index stored_spans_workspace on stored_spans (workspace_id, from_at);

-- Ends an object's span; returns its bytes, or null when there was none.
create function stored_span_end(object text) returns bigint language sql as $$
    update stored_spans set to_at = greatest(from_at, perdure_now()) where object_id = object and to_at is null returning bytes;
$$;

-- A snapshot weighs what it added: pages, its disk layer, its devices. When it goes, pages and layer are still needed by the closest
-- snapshot that descends from it, which from then on weighs them too, but never more than all it refers to.
create function stored_span_inherit(gone snapshots, weight bigint) returns void language plpgsql as $$
declare
    heir snapshots%rowtype;
    was bigint;
    total bigint;
begin
    with recursive below as (
        select s.id, s.state, 1 as depth from snapshots s where s.parent_id = gone.id
        union all
        select s.id, s.state, below.depth + 1 from snapshots s join below on s.parent_id = below.id
        where below.state <> 'complete' and below.depth < 100000
    )
    select s.* into heir from below join snapshots s on s.id = below.id
    where below.state = 'complete' order by s.workspace_id <> gone.workspace_id, below.depth, s.id limit 1;
    select bytes into was from stored_spans where object_id = heir.id and to_at is null;
    total := greatest(was, least(was + weight, heir.memory_total_bytes + heir.disk_total_bytes + heir.device_bytes));
    if total > was then
        perform stored_span_end(heir.id);
        insert into stored_spans (tenant_id, workspace_id, object_id, place, bytes)
        values (heir.tenant_id, heir.workspace_id, heir.id, 'node', total);
    end if;
end $$;

create function meter_snapshot() returns trigger language plpgsql as $$
declare
    is_there boolean := tg_op <> 'DELETE' and new.state = 'complete';
    was_there boolean := tg_op <> 'INSERT' and old.state = 'complete';
    weight bigint;
begin
    if was_there and (not is_there or new.workspace_id <> old.workspace_id) then
        weight := stored_span_end(old.id);
    end if;
    if is_there and (not was_there or weight is not null) then
        insert into stored_spans (tenant_id, workspace_id, object_id, place, bytes)
        values (new.tenant_id, new.workspace_id, new.id, 'node',
                coalesce(weight, new.memory_bytes + new.disk_bytes + new.device_bytes))
        on conflict (object_id) where to_at is null do nothing;
    elsif weight > old.device_bytes then
        perform stored_span_inherit(old, weight - old.device_bytes);
    end if;
    return null;
end $$;
create trigger meter_snapshot after insert or update of state, workspace_id or delete on snapshots
    for each row execute function meter_snapshot();

-- A pack is its first holder's. Shared images are nobody's, and what was found in a store (attempt 0) was not uploaded.
create function meter_pack(pack store_packs) returns void language sql as $$
    insert into stored_spans (tenant_id, workspace_id, object_id, place, bytes, uploaded_bytes)
    select s.tenant_id, s.workspace_id, pack.id, 'store', pack.size, case when pack.generation > 0 then pack.size else 0 end
    from store_holds h join snapshots s on s.id = h.name and s.tenant_id = h.scope
    where h.pack_id = pack.id and pack.state in ('stored', 'condemned')
    order by s.created_at, s.id limit 1
    on conflict (object_id) where to_at is null do nothing;
$$;

create function meter_pack_change() returns trigger language plpgsql as $$
begin
    if tg_op = 'DELETE' or new.state = 'deleting' then
        perform stored_span_end(old.id);
    elsif new.state = 'stored' and old.state = 'pending' then
        perform meter_pack(new);
    end if;
    return null;
end $$;
create trigger meter_pack after update of state or delete on store_packs for each row execute function meter_pack_change();

create function meter_hold() returns trigger language plpgsql as $$
begin
    perform meter_pack(p) from store_packs p where p.id = new.pack_id;
    return null;
end $$;
create trigger meter_hold after insert on store_holds for each row execute function meter_hold();

-- What is there already counts from now on; it was not uploaded again.
insert into stored_spans (tenant_id, workspace_id, object_id, place, bytes)
select s.tenant_id, s.workspace_id, s.id, 'node',
       s.device_bytes + case when p.id is null then s.memory_total_bytes + s.disk_total_bytes else s.memory_bytes + s.disk_bytes end
from snapshots s left join snapshots p on p.id = s.parent_id and p.state = 'complete'
where s.state = 'complete';
select meter_pack(p) from store_packs p;
update stored_spans set uploaded_bytes = 0;
