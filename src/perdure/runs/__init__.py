"""Durable executions. ``protocol`` is AWS's wire, ``engine`` decides what becomes of an execution; both are pure."""
