"""Token buckets: how often, and what is put on record of what comes too often. Pure: ``now`` is an argument, in seconds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

#: Sums of many small numbers are not exact; who waits as long as it was told to is admitted.
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Rate:
    """``per_s`` tokens come in each second, and at most ``burst`` lie ready."""

    per_s: float
    burst: float


class Buckets:
    """A bucket for each name. Of more than ``names_max`` those that were used longest ago are forgotten, as if they were full."""

    def __init__(self, rate: Rate, names_max: int = 10_000) -> None:
        assert rate.per_s > 0 and rate.burst >= 1, "such a bucket would never have a token"
        self._rate = rate
        self._names_max = names_max
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, and when there were so many

    def take(self, name: str, now: float) -> float:
        """Take a token. 0.0: taken; else nothing is, and there will be one after so many seconds."""
        tokens, at = self._left.pop(name, (self._rate.burst, now))
        now = max(now, at)
        tokens = min(self._rate.burst, tokens + (now - at) * self._rate.per_s)
        is_taken = tokens >= 1 - _TOLERANCE
        self._left[name] = (max(0.0, tokens - 1) if is_taken else tokens, now)
        if len(self._left) > self._names_max:
            self._left.popitem(last=False)
        return 0.0 if is_taken else (1 - tokens) / self._rate.per_s

    def __len__(self) -> int:
        return len(self._left)


class Sampler:
    """Which of many things that are alike are put on record. ``each`` bounds those of one name, ``overall`` all together."""

    def __init__(self, each: Rate, overall: Rate, names_max: int) -> None:
        self._each = Buckets(each, names_max)
        self._overall = Buckets(overall)

    def is_chosen(self, name: str, now: float) -> bool:
        return self._each.take(name, now) == 0.0 and self._overall.take("", now) == 0.0
