-- name: shift
-- Tests only: move perdure_now() for the rest of this transaction.
select set_config('perdure.clock_offset', %(offset)s, true);

-- name: now
-- The database's time, the one that all records are stamped with.
select perdure_now() as now;
