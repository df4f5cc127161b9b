"""A guest of a few megabytes that boots in a second or two: busybox and a shell loop on each channel.

A channel takes one line, runs it as a shell command and answers with its output and a line ``[STATUS]``. The root disk is
/dev/vda, the agent disk /dev/vdb. Its kernel, busybox and modules come from the base image.
"""

from __future__ import annotations

from pathlib import Path

INIT = """#!/bin/busybox sh
export PATH=/bin
/bin/busybox mkdir -p /bin /proc /sys /dev /tmp
/bin/busybox mount -t proc proc /proc
/bin/busybox --install -s /bin || /bin/busybox poweroff -f
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
program() { echo "#!/bin/sh" >/bin/$1; cat >>/bin/$1; chmod 755 /bin/$1; }
echo 'echo "$*" >/tmp/memo' | program remember
echo 'cat /tmp/memo' | program recall
echo 'echo "$*" | dd of=/dev/vda bs=4096 conv=sync,fsync 2>/dev/null' | program store
echo 'dd if=/dev/vda bs=4096 count=1 iflag=direct 2>/dev/null | tr -d "\\0" | head -n 1' | program load
echo 'reboot -f' | program restart
echo 'echo c >/proc/sysrq-trigger' | program crash
echo 'poweroff -f' | program shut
for module in /modules/*.ko; do insmod $module; done
serve() {
    exec <>$1 >&0 2>/dev/console
    while :; do # a read ends at once while no host is connected
        while read -r line; do
            sh -c "$line" 2>&1
            echo "[$?]"
        done
        usleep 20000
    done
}
for port in /sys/class/virtio-ports/*; do
    serve /dev/${port##*/} &
done
echo "tiny guest is up" >/dev/console
wait
"""


def read_archive(archive: bytes) -> dict[str, bytes]:
    """Regular files of a newc cpio archive."""
    found, at = {}, 0
    while True:
        fields = [int(archive[at + 6 + i * 8 : at + 14 + i * 8], 16) for i in range(13)]
        mode, size, name_size = fields[1], fields[6], fields[11]
        name = archive[at + 110 : at + 110 + name_size - 1].decode()
        at += (110 + name_size + 3) // 4 * 4
        if name == "TRAILER!!!":
            return found
        if mode & 0o170000 == 0o100000:
            found[name] = archive[at : at + size]
        at += (size + 3) // 4 * 4


def build_initrd(image_initrd: Path, destination: Path) -> None:
    """A newc cpio archive (kernel: Documentation/driver-api/early-userspace/buffer-format.rst)."""
    given = read_archive(image_initrd.read_bytes())
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
    add("bin/busybox", 0o100755, given["bin/busybox"])
    for name in sorted(name for name in given if name.startswith("modules/")):
        add(name, 0o100644, given[name])
    add("init", 0o100755, INIT.encode())
    add("TRAILER!!!", 0)
    destination.write_bytes(archive)
