"""PostgreSQL: the embedded server, the pool, named queries, migrations. The database is the truth; processes are caches of it."""
