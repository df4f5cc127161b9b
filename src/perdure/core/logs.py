"""Logging for a server process: one line per event on stderr, as text or JSON, for structlog and the standard library alike.

Each line has ``timestamp``, ``level`` and ``event``, and what is known of the work that it belongs to: ``request_id``,
``tenant``, ``by``, ``workspace``, ``generation``. Whoever begins a piece of work says so (``exactly``), whoever learns more adds
to it (``note``), and a task that goes on with somebody else's work takes its facts along (``core.inbox``).

No line has a secret in it: what looks like a key, and the values of settings that hold one, are cut out of the finished line, so
that a traceback and a library's own message are covered too.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import structlog
from structlog import contextvars

from perdure.core.config import SECRETS, Settings

#: Libraries that say at INFO what we say better, or nothing of use.
_QUIET = ("alembic", "psycopg.pool", "uvicorn", "websockets", "httpx2")
#: Facts of the request that a piece of work was begun for; what a machine does by itself later is not of that request any more.
_OF_REQUEST = ("request_id", "by")

HIDDEN = "…"
#: What is left of an API key is its beginning, by which people tell keys apart.
_SECRETS = (
    (re.compile(r"(pdk_[\w-]{8})[\w-]+"), rf"\1{HIDDEN}"),
    (re.compile(r"whsec_[A-Za-z0-9+/=_-]+"), f"whsec_{HIDDEN}"),
    (re.compile(r"(?i)\b(bearer|basic) +[\w.~+/=-]+"), rf"\1 {HIDDEN}"),
    (re.compile(r"(://[^/\s:@'\"]*):[^/\s@'\"]+@"), rf"\1:{HIDDEN}@"),
    (re.compile(r"(?i)\b(password|passwd|secret_access_key)(=| = |': '|\": \")[^\s'\",)]+"), rf"\1\2{HIDDEN}"),
)
#: Shorter values of settings are not searched for: they would be found in words.
_SECRET_LENGTH_MIN = 8


# ------------------------------------------------------------------------------------------------------------- what lines say


def note(**facts: Any) -> None:
    """From here on, the lines of the current piece of work have these facts too, and no longer those that are None here.
    Inside ``exactly`` or a task of one's own."""
    contextvars.bind_contextvars(**{name: value for name, value in facts.items() if value is not None})
    contextvars.unbind_contextvars(*(name for name, value in facts.items() if value is None))


def facts() -> dict[str, Any]:
    """Those of the current piece of work."""
    return dict(contextvars.get_contextvars())


@contextmanager
def exactly(facts: Mapping[str, Any]) -> Iterator[None]:
    """Lines inside the block, and of tasks that begin in it, have these facts and no others."""
    before = contextvars.get_contextvars()
    contextvars.clear_contextvars()
    contextvars.bind_contextvars(**facts)
    try:
        yield
    finally:
        contextvars.clear_contextvars()
        contextvars.bind_contextvars(**before)


def of_machine(**known: Any) -> dict[str, Any]:
    """For ``exactly``: what stays true when the request that began this is long answered."""
    return {name: value for name, value in facts().items() if name not in _OF_REQUEST} | known


def request_id() -> str:
    """Of the request that is being served, "" where there is none."""
    return str(contextvars.get_contextvars().get("request_id", ""))


# ------------------------------------------------------------------------------------------------------------------- secrets


def redactor(settings: Settings) -> Callable[[str], str]:
    """Takes secrets out of a finished line."""
    known = sorted(_secret_values(settings), key=len, reverse=True)

    def redact(line: str) -> str:
        for value in known:
            line = line.replace(value, HIDDEN)
        for pattern, instead in _SECRETS:
            line = pattern.sub(instead, line)
        return line

    return redact


def _secret_values(settings: Settings) -> set[str]:
    """Parts of settings that nobody may read. Of a URL only the password: its host is what a log is read for."""
    found: set[str] = set()
    for name in SECRETS:
        value = getattr(settings, name)
        for text in value if isinstance(value, tuple) else (value or "",):
            password = re.search(r"://[^/\s:@]*:([^/\s@]+)@", text)
            option = re.match(r"(?i)\w*(?:secret|key|token|password|sas)\w*=(.+)", text)
            plain = text if "://" not in text and "=" not in text else ""
            found |= {part for part in (plain, password and password[1], option and option[1]) if part}
    return {value for value in found if len(value) >= _SECRET_LENGTH_MIN}


# --------------------------------------------------------------------------------------------------------------------- set up


def configure(settings: Settings) -> None:
    """Set up once per process, before anything logs."""
    level = getattr(logging, settings.log_level.upper())
    structlog.configure(
        processors=[*_shared(), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(settings))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


def _shared() -> list[structlog.types.Processor]:
    return [
        contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def formatter(settings: Settings) -> logging.Formatter:
    """Renders lines of structlog and of the standard library."""
    as_json = settings.log_format == "json"
    render: structlog.types.Processor = (
        structlog.processors.JSONRenderer(default=str)
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
    )
    redact = redactor(settings)

    def finish(logger: Any, name: str, event: structlog.types.EventDict) -> str:
        rendered = render(logger, name, event)
        return redact(rendered if isinstance(rendered, str) else str(rendered))

    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*_shared(), structlog.stdlib.ExtraAdder()],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *([structlog.processors.format_exc_info] if as_json else []),
            finish,
        ],
    )
