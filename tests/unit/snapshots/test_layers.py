"""New disk layers are what QEMU makes of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from perdure.core.errors import CorruptSnapshot, InvalidRequest
from perdure.core.files import stored_bytes
from perdure.snapshots.layers import MAX_DISK_BYTES, create_layer, inspect


def qemu(*argv: str | Path) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


@pytest.mark.qemu
@pytest.mark.parametrize("size", [1 << 30, 8 << 30, MAX_DISK_BYTES])
def test_qemu_takes_a_layer_and_finds_nothing_wrong(tmp_path: Path, size: int) -> None:
    path = tmp_path / "layer.qcow2"
    create_layer(path, size)
    assert (inspect(path).virtual_bytes, inspect(path).has_data) == (size, False)
    assert stored_bytes(path) <= 64 << 10
    assert "No errors" in qemu("qemu-img", "check", path)
    qemu("qemu-io", "-f", "qcow2", "-c", "write -P 5 1M 3072", "-c", f"write -P 6 {size - 512} 512", path)
    assert inspect(path).has_data
    assert "No errors" in qemu("qemu-img", "check", path)
    assert stored_bytes(path) < 1 << 20


@pytest.mark.qemu
def test_the_layers_of_earlier_releases_are_read(tmp_path: Path) -> None:
    path = tmp_path / "layer.qcow2"
    qemu("qemu-img", "create", "-q", "-f", "qcow2", "-o", "extended_l2=on,cluster_size=64k", path, "1G")
    assert (inspect(path).virtual_bytes, inspect(path).has_data) == (1 << 30, False)
    qemu("qemu-io", "-f", "qcow2", "-c", "write -P 5 1M 3072", path)
    assert inspect(path).has_data


@pytest.mark.qemu
def test_a_larger_layer_reads_zeros_above_the_smaller_one_below(tmp_path: Path) -> None:
    low, high = tmp_path / "low.qcow2", tmp_path / "high.qcow2"
    create_layer(low, 1 << 30)
    create_layer(high, 2 << 30)
    qemu("qemu-io", "-f", "qcow2", "-c", "write -P 5 0 1M", low)
    graph = f"driver=qcow2,file.filename={high},backing.driver=qcow2,backing.file.filename={low}"
    qemu("qemu-io", "--image-opts", "-c", "read -P 5 0 1M", "-c", "read -P 0 1500M 1M", "-c", "write -P 7 1500M 1M", graph)
    qemu("qemu-io", "--image-opts", "-c", "read -P 7 1500M 1M", graph)


@pytest.mark.parametrize("size", [0, -5, 1000, MAX_DISK_BYTES + 512])
def test_a_size_that_cannot_be_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(InvalidRequest, match="cannot be made") as caught:
        create_layer(tmp_path / "layer.qcow2", size)
    assert "Choose 1 to 2048 GiB" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_layer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "layer.qcow2"
    with pytest.raises(CorruptSnapshot, match=r"layer\.qcow2 is damaged: the file is missing"):
        inspect(path)
    create_layer(path, 1 << 30)
    good = path.read_bytes()
    for at, name in [(0, "header"), (7, "header"), (23, "header"), (35, "encryption"), (79, "features")]:
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(CorruptSnapshot, match=name):
            inspect(path)
    path.write_bytes(good[:50])
    with pytest.raises(CorruptSnapshot, match="too short"):
        inspect(path)
