"""A worker: takes invocations of durable functions from a server by HTTP, and runs them in warm processes (ADR 32)."""
