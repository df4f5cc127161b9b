-- What a catalogue made of the store alone could not read has no rows, so that the garbage collection would take it for strays. It
-- stays for a while, for whoever can bring back what is missing.
alter table store_scopes add column collect_after timestamptz;
