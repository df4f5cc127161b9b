"""A small runtime client of Lambda's Runtime API, as those of other languages are: ``python runtime_client.py KIND``."""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
from typing import Any

HOST = os.environ["AWS_LAMBDA_RUNTIME_API"]
BASE = "/2018-06-01/runtime/"


def call(method: str, route: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Any:
    connection = http.client.HTTPConnection(HOST)
    connection.request(method, BASE + route, body, headers or {})
    answer = connection.getresponse()
    answer.data = answer.read()  # type: ignore[attr-defined]
    connection.close()
    return answer


def main(kind: str) -> int:  # noqa: C901 - one answer for each thing a client may do
    if kind == "init-error":
        call("POST", "init/error", json.dumps({"errorType": "ImportError", "errorMessage": "no such module"}).encode())
        return 1
    if kind == "ends":
        return 5
    while True:
        answer = call("GET", "invocation/next")
        request, event = answer.getheader("Lambda-Runtime-Aws-Request-Id"), json.loads(answer.data)
        match event.get("do"):
            case "error":
                told = {"errorType": "Oops", "errorMessage": "bad", "stackTrace": ["line 1"]}
                call("POST", f"invocation/{request}/error", json.dumps(told).encode())
            case "odd-error":
                call("POST", f"invocation/{request}/error", b"no json", {"Lambda-Runtime-Function-Error-Type": "Odd"})
            case "hang":
                threading.Event().wait()
            case "die":
                os._exit(7)
            case "forget":
                continue
            case "wrong-id":
                status = call("POST", "invocation/another/response", b"1").status
                call("POST", f"invocation/{request}/response", str(status).encode())
            case "wrong-route":
                call("POST", f"invocation/{request}/response", str(call("PUT", "nothing").status).encode())
            case _:
                names = ("Invoked-Function-Arn", "Deadline-Ms", "Trace-Id")
                headers = {name: answer.getheader(f"Lambda-Runtime-{name}") for name in names}
                told = {"event": event, "headers": headers, "function": os.environ["AWS_LAMBDA_FUNCTION_NAME"]}
                assert call("POST", f"invocation/{request}/response", json.dumps(told).encode()).status == 202


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
