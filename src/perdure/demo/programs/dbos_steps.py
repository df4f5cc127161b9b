"""Durable steps on DBOS, for ``perdure bench runs``: the same work on the same PostgreSQL. Prints one JSON document.

    dbos_steps.py steps|die|replay URL STEPS CLIENTS

A step is a function that returns 200 characters. ``die`` ends the process before the last step of a workflow; then ``replay``
runs it again, and measures from its beginning to that step.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from dbos import DBOS, SetWorkflowID

RESULT = "x" * 200
MARK: dict[str, float] = {}
REPLAYED = threading.Event()


@DBOS.step()
def step(number: int) -> str:
    del number
    return RESULT


@DBOS.step()
def last() -> str:
    if "dies" in MARK:
        tell({})
        os._exit(0)
    MARK["replayed"] = time.perf_counter()
    REPLAYED.set()
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
    last()


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


def main(what: str, url: str, steps: int, clients: int) -> None:
    DBOS(config={"name": "bench", "system_database_url": url, "application_version": "1", "log_level": "ERROR"})
    DBOS.launch()
    if what == "steps":
        tell(measure(steps, clients))
    elif what == "die":
        MARK["dies"] = 1.0
        with SetWorkflowID("long"):
            long(steps)
    else:  # DBOS goes on with it by itself
        REPLAYED.wait()
        tell({"replay_ms": (MARK["replayed"] - MARK["begun"]) * 1000})
    DBOS.destroy()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5]))
