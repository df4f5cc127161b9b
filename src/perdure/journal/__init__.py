"""The journal: the append-only, hash-chained record of what happened to each workspace."""
