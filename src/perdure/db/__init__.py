"""PostgreSQL: the embedded server, the pool, named queries, migrations."""
