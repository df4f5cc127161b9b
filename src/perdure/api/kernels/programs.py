"""The programs of ``inside`` as they travel: one text, read from stdin, so that nothing of them has to be there before."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

_PACKAGE = "perdure.api.kernels.inside"
#: How long the rest of a program may take to arrive: its sender may die in between.
_ARRIVES_S = 120
#: Its beginning is what a list of commands shows.
LOADER = f"'perdure python';import sys,_signal as a;a.alarm({_ARRIVES_S});s=sys.stdin.buffer;exec(s.read(int(s.readline())))"
#: A module is known by its name before its body runs, and a directory that happens to be the current one has no say.
_BODY = """import sys
sys.path[:] = [place for place in sys.path if place]
for name, text in {modules!r}.items():
    module = sys.modules[name] = type(sys)(name)
    exec(compile(text, name, "exec"), module.__dict__)
module.main()
"""


def cell_program() -> bytes:
    """Followed by the two lines that ``inside.cell`` reads."""
    return _program("cell")


def keeper_program() -> bytes:
    """Followed by the line that ``inside.keeper`` reads."""
    return _program("kernel", "runs", "keeper")


@cache
def _program(*names: str) -> bytes:
    """The last module is the one that runs."""
    texts = {f"{_PACKAGE}.{name}": (files(_PACKAGE) / f"{name}.py").read_text("utf-8") for name in names}
    body = _BODY.format(modules=texts).encode()
    return b"%d\n%s" % (len(body), body)
