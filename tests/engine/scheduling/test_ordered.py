"""The ordered set against sorted()."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.ordered import Ordered

pairs = st.tuples(st.sampled_from([-1.5, 0.0, 2.0]), st.integers(0, 5))


@given(st.lists(st.tuples(st.booleans(), pairs)))
def test_it_is_a_sorted_set(operations: list[tuple[bool, tuple[float, int]]]) -> None:
    ordered, model = Ordered(), set()
    for add, pair in operations:
        if add and pair not in model:
            ordered.add(*pair)
            model.add(pair)
        elif not add:
            ordered.discard(*pair)
            model.discard(pair)
        assert len(ordered) == len(model)
        assert ordered.first() == min(model, default=None)
