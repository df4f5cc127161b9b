"""An error that several callers meet is one object for each of them, and says the same to all."""

from __future__ import annotations

import pytest

from perdure.core.errors import Conflict, CorruptSnapshot, PerdureError
from perdure.machines.qmp import QmpError

ERRORS = (
    Conflict("It is asleep.", hint="Wake it.", internal="state 3", ambiguous=True),
    CorruptSnapshot("A file is damaged.", file="segments/seg_1.pages"),
    QmpError("stop", "GenericError", "not now"),  # its constructor takes no sentence
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_twin_says_the_same_and_gathers_its_own_traceback(error: PerdureError) -> None:
    error.details = {**error.details, "ancestor": "snp_1"}
    error.add_note("seen before")
    twin = error.twin()
    assert type(twin) is type(error) and twin is not error
    assert (str(twin), twin.public(), twin.internal) == (str(error), error.public(), error.internal)
    assert {**vars(error), "__notes__": None} == {**vars(twin), "__notes__": None}
    with pytest.raises(type(error)):
        raise twin
    assert twin.__traceback__ is not None and error.__traceback__ is None
    assert not hasattr(twin, "__notes__")
    twin.hint = "another"
    assert error.hint != "another"
