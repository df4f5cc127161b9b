"""Programs that the server sends into a workspace, where they run under its own python3: they need nothing of ours there."""
