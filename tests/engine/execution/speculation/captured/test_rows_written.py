"""What the device is sent of a row of rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.driven import GREEDY
from engine.api import Stopping
from engine.execution.graph_decode.pipeline import RowState
from engine.execution.speculation.captured.captured_rounds import laid_out, state_of
from engine.scheduling.plan import Admitted
from engine.scheduling.sequence_state import begin


@pytest.mark.parametrize("stops", [(), (9,), tuple(range(8))])
def test_each_part_lies_where_the_device_looks_for_it(stops: tuple[int, ...]) -> None:
    sequence = begin(Admitted(0, 0, (5, 6, 7), 3, GREEDY, Stopping(max_tokens=9)))
    row = RowState(7, 2, 40, stops, 0.5, -(1 << 62), (3, 8), sequence, ())
    words = laid_out(row, 4, 77, 128, np.array([5, 6, 7], dtype=np.int32))
    state = state_of(torch.from_numpy(words[:64]))
    assert state.noise_key.tolist() == [-(1 << 62)] * 8
    assert state.temperature.tolist() == [0.5] * 8
    stand = (state.newest, state.held, state.last_position, state.most_drafts, state.count)
    assert [part.item() for part in stand] == [2, 32, 40, 4, 77]
    assert state.stops.tolist() == [[*stops, *[-1] * (8 - len(stops))]]
    assert words[64:].tolist() == [3, 8, *[0] * 126, 5, 6, 7]
