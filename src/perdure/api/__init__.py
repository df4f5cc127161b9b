"""The HTTP API: a parser in front of the typed commands of ``workspaces`` and ``images``. It decides nothing by itself."""

from __future__ import annotations

from perdure.wire import public

public.compile_all()  # before the routes, which make their own parsers of the bodies
