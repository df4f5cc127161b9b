"""Durable steps on DBOS, for ``perdure bench runs``: the same work on the same PostgreSQL. Prints one JSON document.

    dbos_steps.py URL STEPS CLIENTS HISTORY

A step is a function that returns 200 characters. The last figure: a workflow of HISTORY steps whose process ends before its last
one; the next process runs it again, and what is measured is from its beginning to that step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

from dbos import DBOS, SetWorkflowID

RESULT = "x" * 200
MARK: dict[str, float] = {}


@DBOS.step()
def step(number: int) -> str:
    del number
    return RESULT


@DBOS.step()
def last(died: bool) -> str:
    if died:
        os._exit(0)
    MARK["replayed"] = time.perf_counter()
    return RESULT


@DBOS.workflow()
def some(steps: int) -> float:
    begun = time.perf_counter()
    for number in range(steps):
        step(number)
    return time.perf_counter() - begun


@DBOS.workflow()
def long(steps: int) -> None:
    MARK["begun"] = time.perf_counter()
    for number in range(steps):
        step(number)
    last(os.environ.get("DIES") == "1")


def tell(found: dict[str, float]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def measure(steps: int, clients: int) -> dict[str, float]:
    alone_s = some(steps)
    begun = time.perf_counter()
    threads = [threading.Thread(target=some, args=(steps,)) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together_s = time.perf_counter() - begun
    return {"alone_ms": alone_s * 1000 / steps, "together_ms": together_s * 1000 / (steps * clients)}


def replay() -> dict[str, float]:
    while "replayed" not in MARK:  # it is recovered by DBOS itself
        time.sleep(0.01)
    return {"replay_ms": (MARK["replayed"] - MARK["begun"]) * 1000}


def main(url: str, steps: int, clients: int, history: int) -> None:
    DBOS(config={"name": "bench", "system_database_url": url, "application_version": "1", "log_level": "ERROR"})
    if os.environ.get("DIES") == "1":
        DBOS.launch()
        with SetWorkflowID("long"):
            long(history)
    elif os.environ.get("DIES") == "0":
        DBOS.launch()
        found = replay()
        tell(found)
        DBOS.destroy()
    else:
        DBOS.launch()
        found = measure(steps, clients)
        DBOS.destroy()
        for dies in ("1", "0"):
            command = [sys.executable, *sys.argv]
            done = subprocess.run(command, env={**os.environ, "DIES": dies}, capture_output=True, text=True, check=True)
        tell({**found, **json.loads(done.stdout.splitlines()[-1])})


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
