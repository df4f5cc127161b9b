-- Since when nothing has been condemned in the present epoch of a scope: each lasts its time, however many servers collect.
alter table store_scopes add column epoch_at timestamptz;
