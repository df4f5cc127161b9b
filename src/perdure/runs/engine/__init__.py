"""The engine of durable executions: what becomes of one, decided by its history alone. Pure.

tables      what may happen to an operation, and to an execution
facts       what may stand in a history; ``Entry`` is a fact in its place
state       ``fold(history)``, and ``standing``: the one reason why an execution will move again
commands    what may be asked of one, and what a decision holds
decide      ``start`` and ``decide(state, command, now)``
checkpoint  the fence, and what a function is told in return
batch       whether a checkpoint's updates may be recorded: all or none
rules       limits and pauses between attempts: configuration
views       operations, pages, descriptions as the protocol has them
events      a history as AWS's events
parts       a state taken apart for storage, and put together again
"""

from __future__ import annotations

from perdure.runs.engine.checkpoint import children_to_start, current_token, require_token
from perdure.runs.engine.commands import (
    Answer,
    Checkpoint,
    Command,
    CompleteCallback,
    CompleteInvoke,
    Decision,
    Delete,
    Fail,
    Finish,
    Heartbeat,
    Invoke,
    Notice,
    Pause,
    Reply,
    Resume,
    Start,
    StartChild,
    Stop,
    Tick,
    Todo,
    Warn,
)
from perdure.runs.engine.decide import decide, start
from perdure.runs.engine.events import events
from perdure.runs.engine.facts import FACT, CodeRule, Entry, Fact, Failure, Parent, PauseCause
from perdure.runs.engine.fold import fold
from perdure.runs.engine.parts import assemble, head_of, op_text
from perdure.runs.engine.rules import Rules, backoff
from perdure.runs.engine.state import Op, Reason, Standing, State, standing
from perdure.runs.engine.views import checkpoint_answer, description, invocation_input, open_callbacks, operation, page

__all__ = [
    "FACT",
    "Answer",
    "Checkpoint",
    "CodeRule",
    "Command",
    "CompleteCallback",
    "CompleteInvoke",
    "Decision",
    "Delete",
    "Entry",
    "Fact",
    "Fail",
    "Failure",
    "Finish",
    "Heartbeat",
    "Invoke",
    "Notice",
    "Op",
    "Parent",
    "Pause",
    "PauseCause",
    "Reason",
    "Reply",
    "Resume",
    "Rules",
    "Standing",
    "Start",
    "StartChild",
    "State",
    "Stop",
    "Tick",
    "Todo",
    "Warn",
    "assemble",
    "backoff",
    "checkpoint_answer",
    "children_to_start",
    "current_token",
    "decide",
    "description",
    "events",
    "fold",
    "head_of",
    "invocation_input",
    "op_text",
    "open_callbacks",
    "operation",
    "page",
    "require_token",
    "standing",
    "start",
]
