"""Backups of a whole installation, and what brings one back: from a backup, or from the object store alone.

``place`` is where backups lie, ``record`` is the manifest that makes one exist, ``ledger`` stands in for the rows of the object
store's library, for a place has no database. ``make``, ``restore`` and ``recover`` are the three procedures. They join database,
snapshots and images, which know nothing of each other, so only ``wiring`` is above them. What a person needs to know:
docs/guides/backup.md; why it is so: ADR 16.
"""
