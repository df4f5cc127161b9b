"""Durable executions as a service: the engine over PostgreSQL. What it takes and returns is in ``model``."""
