"""Steps: timed, told, and a failed one ends the demo with its sentence."""

from __future__ import annotations

import pytest

from perdure.demo.steps import DemoFailed, Figure, Step, Steps, expect


def test_steps_are_told_in_order_and_a_failure_keeps_its_sentence() -> None:
    told: list[str] = []
    steps = Steps(lambda step: told.append("begin " + step.name), lambda step: told.append(f"end {step.name} {step.ok}"))
    with steps.step("one") as one:
        one.detail = "fine"
    with pytest.raises(DemoFailed), steps.step("two"):
        expect([], "Nothing was found.")
    assert told == ["begin one", "end one True", "begin two", "end two False"]
    assert [step.public() | {"seconds": 0} for step in steps.done] == [
        {"name": "one", "ok": True, "seconds": 0, "detail": "fine"},
        {"name": "two", "ok": False, "seconds": 0, "detail": "Nothing was found."},
    ]


def test_an_interrupted_step_is_not_ok() -> None:
    ended: list[Step] = []
    steps = Steps(lambda _step: None, ended.append)
    with pytest.raises(KeyboardInterrupt), steps.step("one"):
        raise KeyboardInterrupt
    assert [step.ok for step in ended] == [False]


def test_what_holds_says_nothing() -> None:
    expect("yes", "unused")


def test_a_figure_has_its_share_of_a_cold_boot_only_when_it_is_a_time() -> None:
    assert Figure("wake", 100, "ms", 0.02).public() == {"name": "wake", "value": 100, "unit": "ms", "ratio_to_cold_boot": 0.02}
    assert Figure("bytes", 5, "bytes").public()["ratio_to_cold_boot"] is None
