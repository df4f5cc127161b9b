"""A real S3 server on loopback (moto), behind a door that a test can close, slow down or leave half open."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from perdure.snapshots.objects.client import ClientSettings, ObstoreObjects, open_objects

CONDITIONS = ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH", "HTTP_IF_MODIFIED_SINCE", "HTTP_IF_UNMODIFIED_SINCE")
BUCKET = "bucket"


class Trouble(Enum):
    ERROR = "500"
    HANG = "nothing is done and no answer comes"
    LOST = "it is done and no answer comes"
    CUT = "the answer ends in the middle"


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    conditions: tuple[str, ...]


@dataclass
class S3:
    """``trouble`` is asked for each request. With ``ignores_conditions`` the server is one that knows no conditional requests."""

    port: int = 0
    ignores_conditions: bool = False
    trouble: Callable[[Request], Trouble | None] = field(default=lambda request: None)
    requests: list[Request] = field(default_factory=list)
    let_go: threading.Event = field(default_factory=threading.Event)

    def objects(self, prefix: str = "", **settings: Any) -> ObstoreObjects:
        options = {
            "endpoint": f"http://127.0.0.1:{self.port}",
            "access_key_id": "key",
            "secret_access_key": "secret",
            "region": "us-east-1",
            "client_options": {"allow_http": True},
        }
        return open_objects(f"s3://{BUCKET}{prefix}", ClientSettings(options, **settings))


class _Door:
    def __init__(self, s3: S3, inner: Any) -> None:
        self._s3 = s3
        self._inner = inner

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        conditions = tuple(name for name in CONDITIONS if name in environ)
        request = Request(environ["REQUEST_METHOD"], environ["PATH_INFO"], conditions)
        self._s3.requests.append(request)
        if self._s3.ignores_conditions:
            for name in conditions:
                del environ[name]
        trouble = self._s3.trouble(request)
        if trouble is Trouble.ERROR:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("500 Internal Server Error", [("Content-Length", "0")])
            return [b""]
        if trouble is Trouble.HANG:
            return self._silence()
        answer = self._inner(environ, start_response)
        if trouble is Trouble.LOST:
            for _ in answer:
                pass
            return self._silence()
        if trouble is Trouble.CUT:
            whole = b"".join(answer)
            return [whole[: len(whole) // 2]]
        return answer  # type: ignore[no-any-return]

    def _silence(self) -> Iterator[bytes]:
        """No byte before the test ends."""
        self._s3.let_go.wait(60)
        raise ConnectionAbortedError
        yield b""


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        return


@contextmanager
def s3_server(*, ignores_conditions: bool = False) -> Iterator[S3]:
    """A server with one empty bucket."""
    s3 = S3(ignores_conditions=ignores_conditions)
    door = _Door(s3, DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, door, threaded=True, request_handler=_Quiet)
    s3.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, name="s3", daemon=True)
    thread.start()
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{s3.port}",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        region_name="us-east-1",
    )
    try:
        client.create_bucket(Bucket=BUCKET)
        s3.requests.clear()
        yield s3
        s3.let_go.set()
        s3.trouble = lambda request: None
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
            keys = [{"Key": listed["Key"]} for listed in page.get("Contents", [])]
            if keys:
                client.delete_objects(Bucket=BUCKET, Delete={"Objects": keys})
        client.delete_bucket(Bucket=BUCKET)
    finally:
        s3.let_go.set()
        client.close()
        server.shutdown()
        thread.join(30)
        server.server_close()
