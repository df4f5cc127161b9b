"""The lattice of scopes, as documented."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.scopes import KeyScope, granted

ADMIN, OPERATE, INVOKE, APPROVE, READ = KeyScope
SETS = st.frozensets(st.sampled_from(KeyScope))


@pytest.mark.parametrize(
    ("scope", "included"),
    [
        (ADMIN, {ADMIN, OPERATE, INVOKE, APPROVE, READ}),
        (OPERATE, {OPERATE, INVOKE, READ}),
        (INVOKE, {INVOKE, READ}),
        (APPROVE, {APPROVE, READ}),
        (READ, {READ}),
    ],
)
def test_what_each_scope_includes(scope: KeyScope, included: set[KeyScope]) -> None:
    assert granted([scope]) == included


@given(SETS, SETS)
def test_scopes_add_up_and_nothing_else_does(left: frozenset[KeyScope], right: frozenset[KeyScope]) -> None:
    assert granted(left | right) == granted(left) | granted(right)
    assert granted(granted(left)) == granted(left) >= left


@given(SETS)
def test_no_scopes_together_make_one_that_none_of_them_has(scopes: frozenset[KeyScope]) -> None:
    assert (ADMIN in granted(scopes)) == (ADMIN in scopes)
    assert (APPROVE in granted(scopes)) == bool(scopes & {ADMIN, APPROVE}), "who operates does not approve"
