"""The command line, compared with files that a person has read. ``python -m tests.unit.machines.test_qemu_args`` makes them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.machines.driver import Accelerator, Shape
from perdure.machines.qemu_args import Descriptors, Invocation, Start, arguments, readonly_base

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = {"7.2": ((7, 2, 22), "pc-q35-7.2"), "10.0": ((10, 0, 2), "pc-q35-10.0")}
MODELS = {Accelerator.TCG: "max,-erms,-fsrm", Accelerator.KVM: "Haswell-noTSX"}
#: name -> (start, shared memory)
STARTS = {"cold": (Start.BOOT, False), "pooled": (Start.RESTORE, False), "golden": (Start.BOOT, True)}
CASES = [f"{version}-{accelerator}-{start}" for version, accelerator, start in itertools.product(VERSIONS, Accelerator, STARTS)]


def invocation(case: str) -> Invocation:
    version, accelerator, start = case.split("-")
    number, machine = VERSIONS[version]
    return Invocation(
        guest_name="perdure-m1.0123456789",
        version=number,
        machine=machine,
        cpu_model=MODELS[Accelerator(accelerator)],
        accelerator=Accelerator(accelerator),
        shape=Shape(Path("/k"), Path("/i"), Path("/a"), 512, 2, 8 << 30, ("perdure.debug=1",)),
        shared_ram=STARTS[start][1],
        start=STARTS[start][0],
        fds=Descriptors(qmp=10, serial=11, control=12, data=13, ram=14, kernel=15, initrd=16, agent_disk=17),
    )


def rendered(case: str) -> str:
    """One option with its value per line."""
    lines: list[str] = []
    for word in arguments(invocation(case)):
        if word.startswith("-"):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("case", CASES)
def test_the_command_line_is_the_one_that_was_read(case: str) -> None:
    assert rendered(case) == (GOLDEN / f"{case}.txt").read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_no_path_of_the_host_is_named(case: str) -> None:
    allowed = ("/proc/self/fd/", "/dev/fdset/")
    words = " ".join(arguments(invocation(case)))
    for prefix in allowed:
        words = words.replace(prefix, "")
    assert "/" not in words


@pytest.mark.parametrize("case", CASES)
def test_every_disk_has_an_explicit_format_and_no_locks(case: str) -> None:
    words = arguments(invocation(case))
    assert "-drive" not in words
    nodes = [words[i + 1] for i, word in enumerate(words) if word == "-blockdev"]
    assert len(nodes) == 4
    assert all('"driver":' in node for node in nodes)
    assert all('"locking":"off"' in node for node in nodes if '"driver":"file"' in node)


def test_the_device_tree_is_the_same_for_every_kind_of_start() -> None:
    """Else a state captured from one could not be loaded into another."""

    def devices(case: str) -> list[str]:
        words = arguments(invocation(case))
        return [words[i + 1] for i, word in enumerate(words) if word in ("-device", "-machine", "-cpu", "-smp", "-m", "-append")]

    assert devices("10.0-tcg-cold") == devices("10.0-tcg-pooled") == devices("10.0-tcg-golden")


def test_the_base_is_opened_read_only_where_that_is_possible() -> None:
    assert not readonly_base((7, 2, 22))
    assert readonly_base((8, 2, 0))
    assert "readonly=on,rom=off" in rendered("10.0-tcg-pooled")
    assert "readonly" not in rendered("7.2-tcg-pooled")
    assert "readonly=on,rom=off" not in rendered("10.0-tcg-golden"), "a golden snapshot in the making must be written"


def test_a_data_directory_is_passed_on() -> None:
    words = arguments(replace(invocation("7.2-tcg-cold"), data_dir="/opt/qemu/share"))
    assert words[words.index("-L") + 1] == "/opt/qemu/share"


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in CASES:
        (GOLDEN / f"{name}.txt").write_text(rendered(name))
