-- name: add_scope
-- Every scope has a row to lock.
insert into store_scopes (scope, tenant_id) values (%(scope)s, %(tenant_id)s) on conflict do nothing;

-- name: lock_scope
-- First in every transaction that changes something of a scope.
select epoch, attempts from store_scopes where scope = %(scope)s for update;

-- name: next_attempt
-- Never a number that was there before, not even when the database was restored to an earlier day.
update store_scopes set attempts = greatest(attempts + 1, (extract(epoch from perdure_now()) * 1000000)::bigint)
where scope = %(scope)s
returning attempts, epoch;

-- name: mark_key
-- The mark of the key that the scope is sealed with: this one, if there was none yet.
update store_scopes set key_node = case when key_mark is null then %(node_id)s else key_node end, key_mark = coalesce(key_mark, %(mark)s)
where scope = %(scope)s
returning key_mark, key_node;

-- name: key_mark
select key_mark, key_node from store_scopes where scope = %(scope)s and key_mark is not null;

-- name: advance
-- The next epoch of the collection. No row while the present one has not lasted its time.
update store_scopes set epoch = epoch + 1, epoch_at = perdure_now()
where scope = %(scope)s and (epoch_at is null or epoch_at + make_interval(secs => %(epoch_s)s::double precision) <= perdure_now())
returning epoch;

-- name: in_epoch
-- Whether that is the epoch still. If so its time begins now: what is condemned in it is to have all of it.
update store_scopes set epoch_at = perdure_now() where scope = %(scope)s and epoch = %(epoch)s returning epoch;

-- name: item
-- With what it needs.
select i.*, (select coalesce(json_agg(json_build_array(n.need_scope, n.need_name) order by n.need_scope, n.need_name), '[]'::json)
             from store_needs n where n.scope = i.scope and n.name = i.name) as needs
from store_items i where i.scope = %(scope)s and i.name = %(name)s;

-- name: items
-- Of one scope, by name.
select i.*, (select coalesce(json_agg(json_build_array(n.need_scope, n.need_name) order by n.need_scope, n.need_name), '[]'::json)
             from store_needs n where n.scope = i.scope and n.name = i.name) as needs
from store_items i where i.scope = %(scope)s order by i.name;

-- name: lock_durable
-- Something that is needed. While this lock is held nobody can release it, and what is not released is not collected.
select name from store_items where scope = %(scope)s and name = %(name)s and state = 'durable' for share;

-- name: begin
-- A new attempt. Pins of earlier ones stay.
insert into store_items (scope, name, tenant_id, state, generation, heard_epoch)
values (%(scope)s, %(name)s, %(tenant_id)s, 'uploading', %(attempt)s, %(epoch)s)
on conflict (scope, name) do update set generation = excluded.generation, heard_epoch = excluded.heard_epoch;

-- name: clear_needs
-- Of an attempt before this one.
delete from store_needs where scope = %(scope)s and name = %(name)s;

-- name: add_need
-- The other was locked by lock_durable.
insert into store_needs (scope, name, need_scope, need_name, tenant_id)
values (%(scope)s, %(name)s, %(need_scope)s, %(need_name)s, %(tenant_id)s) on conflict do nothing;

-- name: touch
-- A sign of life of an attempt. No row when it is over.
update store_items i set heard_epoch = s.epoch
from store_scopes s
where s.scope = i.scope and i.scope = %(scope)s and i.name = %(name)s and i.generation = %(attempt)s and i.state = 'uploading'
returning i.name;

-- name: pin_packs
-- Those that are there, and not on their way out; condemned ones are rescued.
update store_packs set state = 'stored', condemned_epoch = null
where scope = %(scope)s and id = any(%(packs)s) and whole and state in ('stored', 'condemned')
returning id;

-- name: hold
-- Packs that this transaction has looked at.
insert into store_holds (scope, name, pack_id, tenant_id)
select %(scope)s, %(name)s, p.id, p.tenant_id from store_packs p where p.id = any(%(packs)s)
on conflict do nothing;

-- name: announce
-- Intent: before the object is written.
insert into store_packs (id, scope, tenant_id, state, generation, size, index_bytes)
values (%(id)s, %(scope)s, %(tenant_id)s, 'pending', %(attempt)s, %(size)s, %(index_bytes)s);

-- name: stored
-- No row unless this item has the pack.
update store_packs p set state = 'stored', whole = true
from store_holds h
where h.pack_id = p.id and h.scope = %(scope)s and h.name = %(name)s and p.id = %(id)s
returning p.id;

-- name: count_stored
-- How many of these packs an item holds and are there.
select count(*) as n from store_holds h join store_packs p on p.id = h.pack_id
where h.scope = %(scope)s and h.name = %(name)s and h.pack_id = any(%(packs)s) and p.state = 'stored';

-- name: let_go
-- Pins that the item does not need after all.
delete from store_holds where scope = %(scope)s and name = %(name)s and not (pack_id = any(%(packs)s));

-- name: commit
-- The commit point: from here on the item is durable in the store.
update store_items set state = 'durable', size = %(size)s, checksum = %(checksum)s, durable_at = perdure_now()
where scope = %(scope)s and name = %(name)s and generation = %(attempt)s and state = 'uploading';

-- name: patient
-- This transaction may stand still for as long as something is being sent.
select set_config('idle_in_transaction_session_timeout', '0', true), set_config('statement_timeout', '0', true),
       set_config('lock_timeout', '0', true);

-- name: alone
-- Until the end of the transaction nobody else is alone with the item of this name.
select pg_advisory_xact_lock(hashtextextended('store item ' || %(key)s, 0));

-- name: release
-- Nobody wants it any more; the collection takes it.
update store_items set state = 'released' where scope = %(scope)s and name = %(name)s;

-- name: holds
-- What an item holds or pins.
select p.* from store_holds h join store_packs p on p.id = h.pack_id
where h.scope = %(scope)s and h.name = %(name)s order by p.id;

-- name: packs
-- What a pin could get.
select * from store_packs where scope = %(scope)s and whole and state in ('stored', 'condemned') order by id;

-- name: collect_items
-- Released ones that nothing needs, and uploads that nothing was heard of. Repeated until none goes: one may have needed another.
delete from store_items i
where i.scope = %(scope)s
  and ((i.state = 'released' and not exists (
            select 1 from store_needs n where n.need_scope = i.scope and n.need_name = i.name))
       or (i.state = 'uploading' and i.heard_epoch < %(epoch)s - 1))
returning i.name;

-- name: doom
-- Second pass: what an earlier epoch condemned and nobody has rescued.
update store_packs p set state = 'deleting'
where p.scope = %(scope)s and p.state = 'condemned' and p.condemned_epoch < %(epoch)s
  and not exists (select 1 from store_holds h where h.pack_id = p.id);

-- name: condemn
-- First pass.
update store_packs p set state = 'condemned', condemned_epoch = %(epoch)s
where p.scope = %(scope)s and p.state in ('pending', 'stored')
  and not exists (select 1 from store_holds h where h.pack_id = p.id);

-- name: deleting
-- Whose objects must go, those of earlier passes included.
select * from store_packs where scope = %(scope)s and state = 'deleting' order by id;

-- name: drop
-- Their objects are gone.
delete from store_packs where id = any(%(packs)s) and state = 'deleting';

-- name: unknown
-- Of listed objects those without a row, by the names that the collector knows them by.
select listed.id as name from unnest(%(packs)s::text[]) as listed (id)
where not exists (select 1 from store_packs p where p.id = listed.id)
union all
select listed.name || '.' || listed.attempt from unnest(%(names)s::text[], %(attempts)s::bigint[]) as listed (name, attempt)
where not exists (select 1 from store_items i
                  where i.scope = %(scope)s and i.name = listed.name and i.generation = listed.attempt);

-- name: forget_strays
-- Those that are no longer listed, or have a row now.
delete from store_strays where scope = %(scope)s and not (name = any(%(names)s));

-- name: note_strays
-- Those that are known keep the epoch in which they were first seen.
insert into store_strays (scope, name, tenant_id, first_epoch)
select %(scope)s, listed.name, %(tenant_id)s, %(epoch)s from unnest(%(names)s::text[]) as listed (name)
on conflict do nothing;

-- name: old_strays
-- Seen in an earlier epoch already.
select name from store_strays where scope = %(scope)s and first_epoch < %(epoch)s order by name;

-- name: holders
-- Who holds a pack, and whether that is final.
select i.scope, i.name, i.state from store_holds h join store_items i on i.scope = h.scope and i.name = h.name
where h.pack_id = %(pack_id)s;

-- name: hold_instead
-- Whoever holds one pack holds another as well.
insert into store_holds (scope, name, pack_id, tenant_id)
select h.scope, h.name, p.id, h.tenant_id from store_holds h, store_packs p
where h.pack_id = %(old)s and p.id = %(new)s
on conflict do nothing;

-- name: drop_holds
-- Of everyone.
delete from store_holds where pack_id = %(pack_id)s;
