-- Which key everything of a tenant in the object store is sealed with, and which node was the first to use it: null until one did. A
-- mark tells whether a key is the same one, and nothing about it.
alter table store_scopes add column key_mark text, add column key_node text;
