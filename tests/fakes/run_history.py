"""One execution in memory: its history, and what it is. Shared by everything that runs the engine without a database."""

from __future__ import annotations

from dataclasses import dataclass, field

from perdure.runs.engine import FACT, Decision, Entry, Reason, State, Warn, fold


@dataclass(slots=True)
class Run:
    state: State
    history: list[Entry]
    warnings: list[Warn] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    @classmethod
    def begun(cls, decision: Decision) -> Run:
        return cls(decision.state, [stored(entry) for entry in decision.entries])

    def take(self, decision: Decision) -> None:
        """Append what was decided. The history says what the decision says, and something will move it again."""
        entries = [stored(entry) for entry in decision.entries]
        self.history += entries
        self.state = fold(entries, onto=self.state)
        assert self.state == decision.state, "the history says something else than the decision"
        assert decision.standing.reason is not Reason.STUCK, "nothing will ever move it again"
        self.decisions.append(decision)
        self.warnings += [todo for todo in decision.todo if isinstance(todo, Warn)]


def stored(entry: Entry) -> Entry:
    """As it comes back from a database."""
    return Entry(entry.seq, entry.at, FACT.validate_json(entry.fact.model_dump_json(exclude_none=True)))
