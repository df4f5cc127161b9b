"""The way from AWS's clients in a handler to the server: what passes, as what, and what does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import boto3
import httpx2
import pytest
from botocore.config import Config
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.sdk._core import Target
from perdure.worker import http
from perdure.worker.door import CREDENTIALS, Door
from perdure.worker.http import Loopback, Request, Response

ARN = "arn:aws:lambda:us-east-1:000000000000:function:main:$LATEST/durable-execution/n+1/e1"


class Behind:
    """The server behind a door: it remembers what came, and answers what a test wants."""

    def __init__(self) -> None:
        self.came: list[Request] = []
        self.reply = Response(200, b"{}", {"content-type": "application/json", "x-amz-durable-execution-arn": ARN})

    async def answer(self, request: Request) -> Response:
        self.came.append(request)
        return self.reply


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[Door, Behind]]:
    behind = Behind()
    server = Loopback(behind.answer)
    await server.open()
    url = f"http://127.0.0.1:{server.port}"
    try:
        async with Door(Target(url, None, "pdk_secret", url)) as door:
            yield door, behind
    finally:
        await server.close()


def client(door: Door, monkeypatch: pytest.MonkeyPatch, service: str = "lambda") -> Any:
    """As AWS's SDK makes one: from its process's environment."""
    for name, value in door.environment({}).items():
        monkeypatch.setenv(name, value)
    return boto3.client(service, config=Config(retries={"mode": "standard", "max_attempts": 2}))


async def test_boto3_comes_through_with_the_workers_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as (door, behind):
        aws = await asyncio.to_thread(client, door, monkeypatch)
        behind.reply = Response(200, b'{"CheckpointToken": "t2"}', {"content-type": "application/json"})
        answer = await asyncio.to_thread(
            lambda: aws.checkpoint_durable_execution(DurableExecutionArn=ARN, CheckpointToken="t1", Updates=[])
        )
        assert answer["CheckpointToken"] == "t2"
        (request,) = behind.came
        assert request.target.startswith("/2025-12-01/durable-executions/arn%3Aaws") and "%2F" in request.target
        assert request.header(b"authorization") == "Bearer pdk_secret" and json.loads(request.body)["CheckpointToken"] == "t1"


async def test_an_answers_own_headers_and_errors_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as (door, behind):
        aws = await asyncio.to_thread(client, door, monkeypatch)
        answer = await asyncio.to_thread(lambda: aws.invoke(FunctionName="main", Payload=b"{}"))
        assert answer["DurableExecutionArn"] == ARN
        typed = {"x-amzn-errortype": "ResourceNotFoundException", "content-type": "application/json"}
        behind.reply = Response(404, b'{"message": "no"}', typed)
        with pytest.raises(aws.exceptions.ResourceNotFoundException):
            await asyncio.to_thread(lambda: aws.invoke(FunctionName="main", Payload=b"{}"))


async def test_task_tokens_of_step_functions_come_through(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as (door, behind):
        aws = await asyncio.to_thread(client, door, monkeypatch, "stepfunctions")
        await asyncio.to_thread(lambda: aws.send_task_success(taskToken="t", output="1"))
        assert (behind.came[0].target, behind.came[0].header(b"x-amz-target")) == ("/", "AWSStepFunctions.SendTaskSuccess")


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(["%2F", "%2f", "%3A", "%24", "%25", "a", "+", "~", ":", "$", "%2B"]), min_size=1).map("".join))
def test_a_path_arrives_byte_for_byte(name: str) -> None:
    """Whoever decodes it on the way breaks ARNs."""

    async def through() -> str:
        async with opened() as (door, behind), httpx2.AsyncClient(verify=False) as plain:
            url = httpx2.URL(door.url)
            target = f"{url.raw_path.decode()}/2025-12-01/durable-executions/{name}/state?Marker=a%2Fb"
            await plain.get(url.copy_with(raw_path=target.encode()))
            return behind.came[0].target

    assert asyncio.run(through()) == f"/2025-12-01/durable-executions/{name}/state?Marker=a%2Fb"


@pytest.mark.parametrize("path", ["/v1/workspaces", "/v1/keys", "/", "", "/2025-12-01/../v1/keys", "/2015-03-31/functionsx"])
async def test_nothing_but_the_service_is_behind_it(path: str) -> None:
    async with opened() as (door, behind), httpx2.AsyncClient(verify=False) as plain:
        url = httpx2.URL(door.url)
        answer = await plain.post(url.copy_with(raw_path=url.raw_path + path.encode()), content=b"{}")
        assert (answer.status_code, answer.headers["x-amzn-errortype"]) == (403, "AccessDeniedException")
        assert not behind.came


async def test_who_does_not_know_the_secret_is_refused() -> None:
    """Anybody on this host can connect to loopback."""
    async with opened() as (door, behind), httpx2.AsyncClient(verify=False) as plain:
        for prefix in ("", "/guess", httpx2.URL(door.url).path[:-1]):
            url = httpx2.URL(door.url).copy_with(raw_path=f"{prefix}/2015-03-31/functions/main/invocations".encode())
            assert (await plain.post(url, content=b"{}")).status_code == 403
        assert not behind.came


async def test_a_server_that_is_away_is_an_error_that_aws_clients_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Door(Target("http://127.0.0.1:1", None, None, "there")) as door:
        aws = await asyncio.to_thread(client, door, monkeypatch)
        with pytest.raises(aws.exceptions.ServiceException) as caught:
            await asyncio.to_thread(lambda: aws.invoke(FunctionName="main", Payload=b"{}"))
        assert caught.value.response["ResponseMetadata"]["RetryAttempts"] > 0


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", b"nonsense\r\n\r\n"])
async def test_an_answer_that_breaks_off_is_such_an_error_too(reply: bytes) -> None:
    asked = []

    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(reply)
        writer.close()

    server = await asyncio.start_server(broken, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, Door(Target(url, None, None, url)) as door, httpx2.AsyncClient(verify=False) as plain:
        answer = await plain.post(f"{door.url}/2015-03-31/functions/main/invocations", content=b"{}")
        assert (answer.status_code, answer.headers["x-amzn-errortype"]) == (503, "ServiceException")
        assert len(asked) == 1  # on a new connection nobody tries again but the client


async def test_a_connection_that_was_closed_while_nobody_used_it_is_replaced() -> None:
    asked = 0

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    server = await asyncio.start_server(once, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, Door(Target(url, None, None, url)) as door, httpx2.AsyncClient(verify=False) as plain:
        for number in range(1, 4):
            answer = await plain.get(f"{door.url}/2015-03-31/functions/main/x")
            assert (answer.status_code, asked) == (200, number)


def test_what_the_user_has_set_for_aws_stays() -> None:
    door = Door(Target("http://127.0.0.1:1", None, None, "there"))
    alone = door.environment({"HOME": "/root", "PERDURE_API_KEY": "k"})
    assert alone["AWS_REGION"] == alone["AWS_DEFAULT_REGION"] == "us-east-1" and CREDENTIALS.items() <= alone.items()
    assert (alone["HOME"], alone["PERDURE_API_KEY"]) == ("/root", "k") and alone["AWS_ENDPOINT_URL_LAMBDA"] == door.url
    set_up = door.environment({"AWS_PROFILE": "work", "AWS_DEFAULT_REGION": "eu-west-1"})
    assert "AWS_ACCESS_KEY_ID" not in set_up and set_up["AWS_REGION"] == "eu-west-1"
    own = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "s"}
    assert own.items() <= door.environment(own).items()


# ------------------------------------------------------------------------------------------------------------------------- http


async def talk(port: int, data: bytes) -> bytes:
    """What comes back until the server closes the connection, or has nothing more to read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    writer.write_eof()
    found = await reader.read()
    writer.close()
    return found


async def test_the_loopback_server_keeps_connections_and_reads_bodies_of_both_kinds() -> None:
    behind = Behind()
    server = Loopback(behind.answer)
    await server.open()
    try:
        first = b"POST /a HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\none"
        second = b"POST /b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\ntwo\r\n0\r\n\r\n"
        answers = await talk(server.port, first + second)
        assert [(one.target, one.body) for one in behind.came] == [("/a", b"one"), ("/b", b"two")]
        assert answers.count(b"HTTP/1.1 200") == 2
    finally:
        await server.close()


async def test_the_loopback_server_stands_what_is_no_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_LIMIT_BYTES", 4)
    behind = Behind()
    server = Loopback(behind.answer)
    await server.open()
    try:
        for data in (
            b"",
            b"hello\r\n\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nab",
        ):
            await talk(server.port, data)
        large = b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n12345"
        assert (await talk(server.port, large)).startswith(b"HTTP/1.1 413")
        assert not behind.came
        assert (await talk(server.port, b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n")).startswith(b"HTTP/1.1 200")
    finally:
        await server.close()
