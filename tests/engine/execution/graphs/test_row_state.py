"""What the host writes of the rows of a step."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.execution.graphs.row_state import RowLayout
from engine.execution.needs import MOST_STOPS
from engine.execution.pipeline import RowState
from engine.kernels.ring import RING, entry_of, words
from tests.engine.execution.slow_device import request
from tests.engine.stepped import holding

_INT32 = st.integers(-1, 2**31 - 1)
_ROWS = st.lists(
    st.builds(
        RowState,
        token=_INT32,
        position=_INT32,
        last_position=_INT32,
        stops=st.lists(_INT32, max_size=MOST_STOPS).map(tuple),
        temperature=st.floats(0, 4, width=32),
        noise_key=st.integers(-(2**63), 2**63 - 1),
        pages=st.just(()),
        sequence=st.just(holding(request([1]), [], 0)),
        unreported=st.just(()),
    ),
    max_size=8,
)


@given(rows=_ROWS, idle=st.integers(0, 3), number=st.integers(0, 2**31 - 1))
def test_a_block_says_of_each_row_what_it_is_and_that_the_others_are_idle(
    rows: list[RowState], idle: int, number: int
) -> None:
    width = max(1, len(rows) + idle)
    layout = RowLayout(width)
    state = layout.state(torch.from_numpy(layout.of(rows, number)))
    nobody = width - len(rows)
    assert state.count.tolist() == [number] * width
    assert state.newest.tolist() == [row.position for row in rows] + [-1] * nobody
    assert state.token.tolist() == [row.token for row in rows] + [0] * nobody
    assert state.last_position.tolist() == [row.last_position for row in rows] + [0] * nobody
    assert state.draws[0].noise_key.tolist() == [row.noise_key for row in rows] + [0] * nobody
    assert state.draws[0].temperature.tolist() == [row.temperature for row in rows] + [0] * nobody
    stops = [[*row.stops, *[-1] * (MOST_STOPS - len(row.stops))] for row in rows]
    assert state.stops.tolist() == stops + [[-1] * MOST_STOPS] * nobody


def test_an_entry_is_there_once_its_number_is() -> None:
    ring = torch.zeros(2, RING, dtype=torch.int64)
    entries = words(ring)
    assert entry_of(entries, 1, 3) is None
    ring[1, 2] = 3 << 32 | 77
    assert entry_of(entries, 1, 3) == 77
    assert entry_of(entries, 1, 3 + RING) is None, "of a lap before"
    assert entry_of(entries, 0, 3) is None
