"""A store from its settings: options as people write them, and a look at a store that is or is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.core.errors import InvalidRequest, Unavailable
from perdure.snapshots.objects.keys import PlainKeyring
from perdure.snapshots.objects.opening import Found, open_remote, parse_options, probe
from tests.fakes.s3 import BUCKET, s3_server


def test_options_are_names_and_values() -> None:
    assert parse_options(()) == {}
    assert parse_options(("region=eu", " virtual_hosted_style_request = TRUE")) == {
        "region": "eu",
        "virtual_hosted_style_request": True,
    }
    assert parse_options(("endpoint=http://127.0.0.1:9",))["client_options"] == {"allow_http": True}
    assert "client_options" not in parse_options(("endpoint=https://host",))
    assert parse_options(("token=a=b",)) == {"token": "a=b"}


@pytest.mark.parametrize("option", ["", "region", "=eu", " =x"])
def test_what_is_no_option_is_told(option: str) -> None:
    with pytest.raises(InvalidRequest, match="is not NAME=VALUE") as caught:
        parse_options((option,))
    assert "PERDURE_STORE_OPTIONS=" in caught.value.hint


async def test_a_look_says_whose_it_is_or_why_nothing_can_be_said(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/objects"
    assert await probe(url, ()) is Found.EMPTY
    await open_remote(url, (), PlainKeyring(), lambda: 1).claim("we")
    assert await probe(url, ()) is Found.CLAIMED
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "photo").write_bytes(b"not ours")
    assert await probe(f"file://{tmp_path}/others", ()) is Found.STRANGE
    with pytest.raises(Unavailable, match="did not give"):
        await probe("s3://bucket", ("endpoint=http://127.0.0.1:9", "access_key_id=a", "secret_access_key=b", "region=x"))
    for wrong in ("s3://bucket?x=1", "nonsense", "s3://"):
        with pytest.raises(InvalidRequest):
            await probe(wrong, ())
    with pytest.raises(InvalidRequest, match="cannot be set up"):
        await probe("s3://bucket", ("no_such_option=1",))


async def test_an_endpoint_from_options_and_credentials_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as s3:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        options = (f"endpoint=http://127.0.0.1:{s3.port}", "region=us-east-1")
        url = f"s3://{BUCKET}/here"
        await open_remote(url, options, PlainKeyring(), lambda: 1).claim("we")
        assert await probe(url, options) is Found.CLAIMED
