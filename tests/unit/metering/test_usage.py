"""Sums of amounts."""

from __future__ import annotations

from dataclasses import astuple, fields
from datetime import timedelta

from perdure.metering.usage import Amounts, total


def test_the_sum_of_nothing_is_nothing() -> None:
    assert total([]) == Amounts()


def test_each_amount_is_summed_by_itself() -> None:
    first = Amounts(*(timedelta(seconds=n) if n < 3 else n for n in range(len(fields(Amounts)))))
    tenfold = Amounts(*(value * 10 for value in astuple(first)))
    assert astuple(total([first, tenfold])) == tuple(value * 11 for value in astuple(first))
