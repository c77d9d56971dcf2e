"""What an entry of a ring says of a prompt's token."""

from __future__ import annotations

import pytest

from engine.errors import EngineFailed
from engine.execution.graph_decode.pipeline import NO_TOKEN
from engine.execution.graph_prefill.first_token import result_of


@pytest.mark.parametrize("number", [1, 7, 2**30, 2**31, 2**32 + 5])
def test_an_entry_is_read_as_its_number_says(number: int) -> None:
    written = number % 2**32 << 32 | 77
    signed = written - (written >> 63 << 64)  # as a word of 64 bits is read
    assert result_of(signed, number).token_ids == (77,)
    assert result_of(signed | NO_TOKEN << 24, number).token_ids == ()
    for other in (number - 1, number + 1):
        with pytest.raises(EngineFailed, match="no token"):
            result_of(signed, other)
