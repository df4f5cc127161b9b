"""What lines say of the work they belong to, and that none has a secret in it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from pydantic import ValidationError

from perdure.core import logs
from perdure.core.config import Settings
from perdure.core.inbox import Inbox

SECRET = "pdk_abcdefgh" + "S3cret" * 6


class Lines:
    """What a configured process writes."""

    def __init__(self, settings: Settings) -> None:
        self.stream = io.StringIO()
        self.handler = logging.StreamHandler(self.stream)
        self.handler.setFormatter(logs.formatter(settings))
        self.log = logging.getLogger("tests.lines")
        self.log.handlers[:] = [self.handler]
        self.log.propagate = False
        self.log.setLevel(logging.INFO)

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    @property
    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]


def settings(**fields: Any) -> Settings:
    return Settings(home=Path("/nonexistent"), **fields)


@pytest.fixture
def lines() -> Iterator[Lines]:
    made = Lines(settings(log_format="json", database_url="postgresql://perdure:hunter2hunter2@db.example/perdure"))
    yield made
    made.log.handlers[:] = []


def test_a_line_says_when_how_severe_what_and_of_which_work(lines: Lines) -> None:
    with logs.exactly({"request_id": "req_1", "tenant": "ten_1"}):
        logs.note(workspace="ws_1", generation=3)
        lines.log.info("captured %s", "it", extra={"bytes": 5})
    lines.log.info("afterwards")
    first, second = lines.all
    assert first["timestamp"].endswith("Z")
    known = {"level": "info", "event": "captured it", "request_id": "req_1", "tenant": "ten_1", "workspace": "ws_1"}
    assert {name: first[name] for name in known} == known
    assert (first["generation"], first["bytes"]) == (3, 5)
    assert second["event"] == "afterwards"
    assert not {"request_id", "tenant", "workspace", "generation"} & set(second)


def test_a_fact_that_is_none_is_known_no_longer(lines: Lines) -> None:
    with logs.exactly({"generation": 3}):
        logs.note(workspace="ws_2", generation=None)
        lines.log.info("other")
    assert "generation" not in lines.all[0]


async def test_a_job_logs_for_whoever_asked_and_not_for_whoever_started_the_worker(lines: Lines) -> None:
    inbox, first_in = Inbox("ws_1", 10, lambda _error: None), asyncio.Event()

    async def job(name: str) -> None:
        first_in.set()
        await asyncio.sleep(0)
        lines.log.info(name)

    async def ask(name: str) -> None:
        with logs.exactly({"request_id": f"req_{name}"}):
            await inbox.run(lambda: job(name))

    one = asyncio.create_task(ask("one"))
    await first_in.wait()
    await asyncio.gather(one, ask("two"), ask("three"))
    await inbox.run(lambda: job("nobody"))
    assert [(line["event"], line.get("request_id")) for line in lines.all] == [
        ("one", "req_one"),
        ("two", "req_two"),
        ("three", "req_three"),
        ("nobody", None),
    ]


def test_what_a_machine_does_later_is_of_no_request() -> None:
    with logs.exactly({"request_id": "req_1", "by": "key:1", "tenant": "ten_1"}):
        assert logs.of_machine(workspace="ws_1") == {"tenant": "ten_1", "workspace": "ws_1"}


# ----------------------------------------------------------------------------------------------------------------- secrets


@pytest.mark.parametrize(
    "text",
    [
        SECRET,
        f"Authorization: Bearer {SECRET}",
        "authorization: bearer abc.def-ghi",
        "Basic dXNlcjpwYXNz",
        "whsec_" + "c2VjcmV0" * 5,
        "connect to postgresql://u:hunter2hunter2@db/perdure failed",
        "https://bob:swordfish@example.org/x",
        "conninfo host=db password=swordfish user=u",
        "{'password': 'swordfish'}",
        "the server said hunter2hunter2",
    ],
)
@pytest.mark.parametrize("how", ["message", "argument", "extra", "exception", "structlog"])
def test_no_line_has_a_secret(lines: Lines, text: str, how: str) -> None:
    if how == "message":
        lines.log.info(text)
    elif how == "argument":
        lines.log.info("it was %s", text)
    elif how == "extra":
        lines.log.info("it was", extra={"detail": {"inner": [text]}})
    elif how == "structlog":
        logger = structlog.wrap_logger(
            lines.log,
            processors=[structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
            wrapper_class=structlog.stdlib.BoundLogger,
        )
        logger.info("it was", detail=text)
    else:
        try:
            raise RuntimeError(text)
        except RuntimeError:
            lines.log.exception("failed")
    assert lines.all, "a line is still JSON"
    for secret in ("S3cret", "abc.def-ghi", "dXNlcjpwYXNz", "c2VjcmV0", "hunter2", "swordfish"):
        assert secret not in lines.text


def test_a_key_is_known_by_its_beginning(lines: Lines) -> None:
    lines.log.info("key %s", SECRET)
    assert lines.all[0]["event"] == "key pdk_abcdefgh…"


def test_values_of_secret_settings_are_cut_out() -> None:
    redact = logs.redactor(
        settings(
            database_url="postgresql://perdure:s3cr3ts3cr3t@db/perdure",
            api_key="whatever-it-is",
            store_options="endpoint=http://127.0.0.1:9000,secret_access_key=wJalrXUtnFEMI,region=eu-west-1",
        )
    )
    line = redact("s3cr3ts3cr3t whatever-it-is wJalrXUtnFEMI eu-west-1 http://127.0.0.1:9000 db perdure")
    assert line == "… … … eu-west-1 http://127.0.0.1:9000 db perdure"


def test_people_get_a_line_too_and_a_guest_forges_none() -> None:
    made = Lines(settings())
    made.log.info("captured", extra={"detail": "a\nb c", "workspace": "ws_1"})
    made.log.info("key", extra={"key": SECRET})
    first, second = made.text.splitlines()
    assert "captured" in first
    assert "workspace=ws_1" in first
    assert "S3cret" not in second


@pytest.mark.parametrize(("given", "level"), [("DEBUG", "debug"), (" Warning", "warning")])
def test_levels(given: str, level: str) -> None:
    assert settings(log_level=given).log_level == level


def test_a_level_that_does_not_exist_is_told() -> None:
    with pytest.raises(ValidationError, match="log_level"):
        settings(log_level="loud")
