-- name: new_dbos
create database bench_dbos;

-- name: new_runs
create database bench_runs;
