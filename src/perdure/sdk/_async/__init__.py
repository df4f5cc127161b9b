"""The async surface. ``tools/unasync.py`` writes ``perdure.sdk._sync`` from it."""
