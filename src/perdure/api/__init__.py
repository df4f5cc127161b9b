"""The HTTP API: a parser in front of the typed commands of ``workspaces`` and ``images``. It decides nothing by itself."""
