"""The demo's counter, by itself: whoever reads it finds a number."""

from __future__ import annotations

import subprocess
from pathlib import Path

from perdure.demo.story import COUNTER

READS = 3000


def test_a_reader_never_finds_it_empty(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0\n")
    restless = COUNTER.replace("/dev/shm/counter", str(counter)).replace("read -t 0.1 -u 9", ":")
    assert str(counter) in restless and "read -t" not in restless
    with subprocess.Popen(["bash", "-c", restless]) as process:
        try:
            read = [counter.read_text() for _ in range(READS)]
        finally:
            process.kill()
    assert [text for text in read if not text.strip().isdigit()] == []
    assert int(read[-1]) > 0
