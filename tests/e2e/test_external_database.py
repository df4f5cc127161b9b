"""A server of somebody else's PostgreSQL: PERDURE_DATABASE_URL is all it takes, and no cluster of our own is made."""

from __future__ import annotations

from collections.abc import AsyncIterator

import psycopg
import pytest

from tests.e2e.live import serving
from tests.fakes.database import empty_database


@pytest.fixture
async def external() -> AsyncIterator[str]:
    """URL of an empty database of a PostgreSQL that runs elsewhere. Nothing of ours has been in it yet."""
    async with empty_database("external") as url:
        yield url


@pytest.mark.qemu
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_up_with_a_database_of_ones_own(external: str, base_image: object) -> None:
    with serving(PERDURE_DATABASE_URL=external) as live:
        assert live.ok("create", "demo", "--json").json
        assert live.ok("exec", "demo", "--", "echo", "kept").text == "kept"
        assert not (live.home / "db").exists(), "no cluster of our own is made"
        with psycopg.connect(external) as connection:
            assert connection.execute("select name, state from workspaces").fetchall() == [("demo", "running")]
        live.ok("sleep", "demo")
        live.ok("down")
        with psycopg.connect(external) as connection:
            assert connection.execute("select name, state from workspaces").fetchall() == [("demo", "hibernated")]
            backends = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
            assert connection.execute(backends).fetchall() == [(0,)], "the server has let go of the database"
        live.ok("up", "--detach")
        assert live.ok("exec", "demo", "--", "echo", "again").text == "again"
        assert not (live.home / "db").exists()


def test_a_database_that_does_not_answer_is_told_in_one_sentence() -> None:
    with (
        pytest.raises(AssertionError, match=r"The database does not answer\. Check PERDURE_DATABASE_URL"),
        serving(PERDURE_DATABASE_URL="postgresql://nobody@127.0.0.1:9/x"),
    ):
        pytest.fail("it is up without its database")
