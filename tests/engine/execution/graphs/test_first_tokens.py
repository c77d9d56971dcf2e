"""What entries of a ring say of a prompt's token."""

from __future__ import annotations

import pytest
import torch

from engine.execution.graphs.first_tokens import result_of
from engine.execution.pipeline import NO_TOKEN
from engine.kernels.ring import all_entries


@pytest.mark.parametrize("number", [1, 7, 2**30, 2**31, 2**32 + 5])
def test_entries_are_read_once_all_have_their_number(number: int) -> None:
    def entry(number: int, word: int) -> int:
        written = number % 2**32 << 32 | word
        return written - (written >> 63 << 64)  # as a word of 64 bits is read

    ring = torch.tensor([entry(number - 1, 5), entry(number, NO_TOKEN << 24)])
    assert all_entries(ring, number) is None
    ring[0] = entry(number, 77)
    found = all_entries(ring, number)
    assert found is not None
    assert [result_of(one).token_ids for one in found] == [(77,), ()]
    for other in (number - 1, number + 1):
        assert all_entries(ring, other) is None
