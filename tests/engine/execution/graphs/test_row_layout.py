"""What the device is sent of a row of rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.api import GREEDY, Stopping
from engine.execution.graphs.row_state import RowLayout
from engine.execution.pipeline import RowState
from engine.scheduling.plan import Admitted
from engine.scheduling.sequence_state import begin


@pytest.mark.parametrize("stops", [(), (9,), tuple(range(8))])
def test_each_part_lies_where_the_device_looks_for_it(stops: tuple[int, ...]) -> None:
    sequence = begin(Admitted(0, 0, (5, 6, 7), 3, GREEDY, Stopping(max_tokens=9)))
    row = RowState(7, 2, 40, stops, 0.5, -(1 << 62), (3, 8), sequence, (), 4)
    layout = RowLayout(1, 8, 2000)
    words = layout.of([row], 77, [np.array([5, 6, 7], dtype=np.int32)])
    state = layout.state(torch.from_numpy(words))
    assert [one.noise_key.tolist() for one in state.draws] == [[-(1 << 62)] * rows for rows in (8, 2, 1)]
    assert [one.temperature.tolist() for one in state.draws] == [[0.5] * rows for rows in (8, 2, 1)]
    stand = (state.newest, state.held, state.last_position, state.most_drafts, state.count)
    assert [part.item() for part in stand] == [2, 32, 40, 4, 77]
    assert state.stops.tolist() == [[*stops, *[-1] * (8 - len(stops))]]
    assert words[64:].tolist() == [3, 8, *[0] * 126, 5, 6, 7]


@pytest.mark.parametrize(("sequences", "laid"), [(2, 4), (4, 2)])
def test_several_sequences_have_places_of_their_own(sequences: int, laid: int) -> None:
    """One fewer than there is room for: the last is nobody's."""
    layout, rows, known = RowLayout(sequences, laid, 100), [], []
    for at in range(sequences - 1):
        ids = tuple(range(10 * at, 10 * at + 3 + at))
        sequence = begin(Admitted(at, at, ids, len(ids), GREEDY, Stopping(max_tokens=9)))
        rows.append(RowState(ids[-1], 2 + at, 40 + at, (at,), 0.5 + at, 7 + at, (3 + at, 8), sequence, (), at % laid))
        known.append(np.array(ids, dtype=np.int32))
    words = np.full(layout.size, -9, dtype=np.int32)
    for first, part in ((0, layout.of(rows, 77, known)), *layout.others(known)):
        words[first : first + len(part)] = part
    memory = torch.from_numpy(words)
    state, each = layout.state(memory), range(sequences - 1)
    assert state.newest.tolist() == [*(2 + at for at in each), -1]
    for one, rows in zip(state.draws, (laid, 2, 1), strict=True):
        assert one.noise_key.view(sequences, rows)[:-1].tolist() == [[7 + at] * rows for at in each]
        assert one.temperature.view(sequences, rows)[:-1].tolist() == [[0.5 + at] * rows for at in each]
    assert state.last_position.tolist()[:-1] == [40 + at for at in each]
    assert state.most_drafts.tolist()[:-1] == [at % laid for at in each]
    assert state.count.tolist()[:-1] == [77 for _ in each]
    assert state.stops[:-1, 0].tolist() == list(each)
    assert layout.pages(memory)[:-1, :2].tolist() == [[3 + at, 8] for at in each]
    for at, ids in enumerate(known):
        assert layout.history(memory)[at, : len(ids)].tolist() == ids.tolist()
