"""``perdure replay``: an execution's history against the code that lies here. Nothing is written anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from perdure.cli import timeline
from perdure.cli.executions import Ref
from perdure.cli.output import JsonFlag, Status, dump, markup, say, wants_json
from perdure.sdk import Client
from perdure.sdk.replay import Move, Replayed, Verdict, load
from perdure.sdk.replay import replay as replayed

_FITS = {Verdict.SAME, Verdict.GOES_ON}


def replay(
    ctx: typer.Context,
    execution: Ref,
    handler: Annotated[str, typer.Argument(metavar="MODULE:HANDLER", help="As a worker takes it.", show_default=False)],
    json: JsonFlag = False,
) -> Status | None:
    """Run a handler of here against an execution's history, and say whether it fits. Exits 1 when it does not.

    No step runs and nothing is recorded. What stands outside steps is executed, as in any replay.
    """
    as_json = wants_json(ctx, json)
    code = load(handler)
    with Client() as client:
        found = client.executions.get(execution)
        operations = found.operations()
    outcome = replayed(found.info, operations, code)
    if as_json:
        dump({"execution_id": found.id, "handler": handler, "operations": len(operations), **_plain(outcome)})
    else:
        for line in _lines(outcome, len(operations) - 1):
            say(line)
    return None if outcome.verdict in _FITS else Status(1)


def _plain(outcome: Replayed) -> dict[str, object]:
    told = asdict(outcome)
    told["left_out"] = [{"id": one.id, "type": one.type.value, "name": one.name} for one in outcome.left_out]
    return told


def _lines(outcome: Replayed, count: int) -> Iterator[str]:
    of = "1 operation" if count == 1 else f"{count} operations"
    match outcome.verdict:
        case Verdict.SAME:
            yield f"[green]same[/]: {of} of the history fit, and nothing new would be done"
        case Verdict.GOES_ON:
            yield f"[green]goes on[/]: {of} of the history fit"
            yield from (f"  {_move(one)}" for one in outcome.moves)
            if not outcome.moves:
                yield f"  it would end {_end(outcome)}"
        case Verdict.DIFFERS:
            yield f"[red]differs[/]: it would end {_end(outcome)}"
            yield from (f"  leaves out {markup(timeline.name_of(one))}" for one in outcome.left_out)
        case Verdict.NONDETERMINISTIC:
            yield from _mismatch(outcome)


def _move(one: Move) -> str:
    what = f"{one.type} {one.name}" if one.name else f"{one.type} {one.operation_id}"
    return f"with NEW operation {markup(what)}" if one.is_new else f"with {markup(what)}: {markup(one.action)}"


def _end(outcome: Replayed) -> str:
    if outcome.error_type or outcome.error_message:
        told = ": ".join(part for part in (outcome.error_type, outcome.error_message) if part)
        return f"{outcome.status} with {markup(told)}"
    return f"{outcome.status} with {markup(timeline.value(outcome.result))}"


def _mismatch(outcome: Replayed) -> Iterator[str]:
    found = outcome.mismatch
    assert found is not None, "this verdict has one"
    where = " ".join(part for part in (found.type, found.name) if part) or found.operation_id or "an operation"
    yield f"[red]NonDeterministicExecutionError[/] at operation {markup(where)} ({markup(found.operation_id)})"
    for what, had, has in found.differences:
        yield f"  {markup(what)}: expected {markup(had)}, found {markup(has)}"
    if not found.differences:
        yield f"  {markup(found.message)}"
