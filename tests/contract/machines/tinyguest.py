"""A guest of a few megabytes that boots in a second or two: busybox and a shell loop on each channel.

A channel takes one line, runs it as a shell command and answers with its output and a line ``[STATUS]``. On the control
channel the guest says ``hello`` when it is up. The root disk is /dev/vda, the agent disk /dev/vdb.
"""

from __future__ import annotations

import lzma
from pathlib import Path

INIT = """#!/bin/busybox sh
export PATH=/bin
/bin/busybox mkdir -p /bin /proc /sys /dev /tmp
/bin/busybox mount -t proc proc /proc
/bin/busybox --install -s /bin || /bin/busybox poweroff -f
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
for module in /modules/*.ko; do insmod $module; done
serve() {
    exec <>$1 >&0 2>/dev/console
    [ $2 = perdure.control ] && echo hello
    while read -r line; do
        sh -c "$line" 2>&1
        echo "[$?]"
    done
}
for port in /sys/class/virtio-ports/*; do
    serve /dev/${port##*/} $(cat $port/name) &
done
echo "tiny guest is up" >/dev/console
wait
"""


def build_initrd(busybox: Path, modules: tuple[Path, ...], destination: Path) -> None:
    """A newc cpio archive (kernel: Documentation/driver-api/early-userspace/buffer-format.rst)."""
    archive = bytearray()

    def add(name: str, mode: int, content: bytes = b"", device: tuple[int, int] = (0, 0)) -> None:
        path = name.encode() + b"\0"
        numbers = (len(archive) + 1, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(path), 0)
        archive.extend(b"070701" + b"".join(b"%08x" % number for number in numbers) + path)
        archive.extend(b"\0" * (-len(archive) % 4))
        archive.extend(content)
        archive.extend(b"\0" * (-len(archive) % 4))

    for directory in ("bin", "dev", "modules"):
        add(directory, 0o040755)
    add("dev/console", 0o020600, device=(5, 1))
    add("bin/busybox", 0o100755, busybox.read_bytes())
    for module in modules:
        content = module.read_bytes()
        add(f"modules/{module.name.removesuffix('.xz')}", 0o100644, lzma.decompress(content) if module.suffix == ".xz" else content)
    add("init", 0o100755, INIT.encode())
    add("TRAILER!!!", 0)
    destination.write_bytes(archive)
