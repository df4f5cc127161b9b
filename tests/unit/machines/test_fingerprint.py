"""What a fingerprint counts, and what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.machines import qemu_args
from perdure.machines.driver import Accelerator, Shape, VmmIdentity
from perdure.machines.fingerprint import GuestFacts, fingerprint, fingerprint_parts

IDENTITY = VmmIdentity("qemu", (10, 0, 2), "build", "pc-q35-10.0", "max", None)
SHAPE = Shape(Path("/k"), Path("/i"), Path("/a"), 512, 2, 8 << 30, ())


def mark(shape: Shape = SHAPE) -> str:
    return fingerprint(fingerprint_parts(IDENTITY, Accelerator.TCG, shape, GuestFacts("kernel", 2)))


def test_how_much_translated_code_is_kept_costs_nobody_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    now = mark()
    for mib in (16, 128):
        monkeypatch.setattr(qemu_args, "TRANSLATION_CACHE_MIB", mib)
        assert mark() == now


def test_another_argument_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    now = mark()
    real = qemu_args._accelerator
    monkeypatch.setattr(
        qemu_args, "_accelerator", lambda call: [word.replace("thread=multi", "thread=single") for word in real(call)]
    )
    assert mark() != now
