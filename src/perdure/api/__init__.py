"""One ASGI app: HTTP is a parser in front of typed commands."""
