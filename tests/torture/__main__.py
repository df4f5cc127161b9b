"""``python -m tests.torture``: faults, recoveries and invariants until the rounds are done. See docs/torture.md."""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
import signal
import sys
from pathlib import Path

import structlog

from perdure.core.errors import InvalidRequest
from tests.torture.defects import DEFECTS
from tests.torture.model import GOAL, ROUNDS, Outcome, Table
from tests.torture.suite import KINDS, Plan, run


def main() -> int:
    """0 when no invariant was violated and, where the rounds suffice, every point fired; 1 otherwise."""
    arguments = _parser().parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.WARNING)
    seed = secrets.randbelow(1 << 32) if arguments.seed is None else arguments.seed
    print(f"seed={seed}", file=sys.stderr, flush=True)
    kinds = tuple(KINDS) if arguments.all else tuple(arguments.only or ())
    points = tuple(arguments.point or ())
    plan = Plan(arguments.rounds, seed, arguments.defect, kinds, points, arguments.until_violation, arguments.keep)
    try:
        table = asyncio.run(_run(plan))
    except InvalidRequest as error:
        print(error.message, file=sys.stderr)
        return 2
    for violation in table.violations:
        print(violation)
    for line in table.lines():
        print(line)
    print(f"the longest round took {table.longest_s:.1f} s: {table.longest}", file=sys.stderr)
    if table.is_cut_off:
        return 1 if table.violations else 130
    if (silent := table.silent()) and not table.violations:
        print(f"fired less than {GOAL} times: {', '.join(silent)}", file=sys.stderr)
        return 1
    return 1 if table.violations else 0


async def _run(plan: Plan) -> Table:
    """SIGTERM ends it as Ctrl-C does: no database is left behind, and what was found is told."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await run(plan, _show)


def _show(outcome: Outcome, seconds: float) -> None:
    mark = "VIOLATION" if outcome.violations else "ok" if outcome.fired else "did not fire"
    also = f", and {', '.join(outcome.also)}" if outcome.also else ""
    print(f"{outcome.point}: {mark}{also} ({seconds:.1f} s)", file=sys.stderr, flush=True)
    if outcome.violations:
        print(f"  {outcome.detail}", *outcome.violations, sep="\n  ", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--rounds", type=_positive, default=ROUNDS, help="faults, each with its recovery (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="repeats the choices of an earlier run")
    parser.add_argument("--defect", choices=sorted(DEFECTS), help="switch a known defect on: it must be found")
    parser.add_argument("--all", action="store_true", help="virtual machines too")
    parser.add_argument("--only", choices=KINDS, action="append", help="rounds of this kind only; may be given again")
    parser.add_argument("--point", action="append", help="rounds of this point only; may be given again")
    parser.add_argument("--until-violation", action="store_true", help="end with the first violation")
    parser.add_argument("--keep", type=Path, help="copy the homes of servers of which something was violated to this directory")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of rounds: 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
