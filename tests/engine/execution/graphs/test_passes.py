"""Rows laid into passes, read back as the device reads them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as some

from engine.errors import EngineFailed
from engine.execution.graphs.passes import MOST_CHUNKS, TABLE, Pass, PassLayout, passes
from engine.execution.graphs.prefill import SIZES as CAPTURED
from engine.execution.graphs.prefill import filled
from engine.scheduling.plan import Row
from engine.scheduling.sequence_state import SequenceTable
from engine.settings import PAGE_SIZE
from tests.engine.execution.slow_device import request
from tests.engine.stepped import holding, put
from tests.properties import example_count

COSTS = {16: 1.0, 64: 2.0}
MOST = max(COSTS)


def read(one: Pass, chunks: int) -> list[tuple[int, int, int, int]]:
    """(page, offset in it, position, id) of each token, as the kernels find them."""
    layout = PassLayout(MOST, chunks)
    words = layout.words(one).tolist()
    pages = words[layout.pages :]
    assert words[0] == one.tokens
    found = []
    for at in range(chunks):
        first, count, start, owner = words[TABLE + 4 * at : TABLE + 4 * at + 4]
        for m in range(count):
            position = words[layout.positions + first + m]
            assert (position, words[layout.owners + first + m]) == (start + m, owner)
            page = pages[owner + position // PAGE_SIZE]
            found.append((page, position % PAGE_SIZE, position, words[layout.ids + first + m]))
    assert len(found) == one.tokens
    assert all(position == -1 for position in words[layout.positions + one.tokens : layout.owners])
    assert words[1] == len(one.chunks)
    ends = words[layout.ends : layout.ids]
    for at, chunk in enumerate(one.chunks):
        end = chunk.first + chunk.end - chunk.start - 1
        assert ends[4 * at : 4 * at + 4] == [at, 1, words[layout.positions + end], words[layout.owners + end]]
    assert not any(ends[4 * len(one.chunks) :])
    return found


@given(seed=some.integers(0, 2**32), count=some.integers(1, 90))
@examples(max_examples=example_count(60))
def test_every_token_is_fed_once_to_its_own_pages(seed: int, count: int) -> None:
    chance, table = random.Random(seed), SequenceTable()
    rows, expected = [], []
    for key in range(count):
        size = chance.choice((2, 3, 17, 40, 63, 64, 65, 200))
        ids = [chance.randrange(1000) for _ in range(size)]
        pages = chance.sample(range(10000), -(-size // PAGE_SIZE) + 1)
        put(table, holding(request(ids), pages, key))
        start = chance.randrange(size - 1)
        rows.append(Row(key, key, start, chance.randint(1, size - start), True))
        for at in range(start, start + rows[-1].count):
            expected.append((pages[at // PAGE_SIZE], at % PAGE_SIZE, at, ids[at]))
    made = list(passes(rows, table, COSTS, 1000))
    assert [token for one in made for token in read(one, MOST_CHUNKS)] == expected
    for one in made:
        assert 0 < one.tokens <= MOST
        keys = [chunk.row.key for chunk in one.chunks]
        assert len(set(keys)) == len(keys) <= MOST_CHUNKS
        if len(keys) == 1:
            assert read(one, 1) == read(one, MOST_CHUNKS)
    assert [chunk.row.key for one in made for chunk in one.chunks if chunk.whole] == list(range(count))


@pytest.mark.parametrize("outside", [999, 2**32 + 1, -1])
def test_an_id_outside_the_vocabulary_is_refused(outside: int) -> None:
    table = SequenceTable()
    put(table, holding(request([1, outside]), [0]))
    with pytest.raises(EngineFailed, match="vocabulary"):
        list(passes([Row(0, 0, 0, 2, True)], table, COSTS, 999))


# Milliseconds on an H100, about: where products take the time, and where layers of few tokens are as slow.
LARGE = dict(zip(CAPTURED, (2.3, 2.6, 3.2, 5, 7.4, 9.6, 11.7, 15.7, 21, 31.8, 42, 64, 90), strict=True))
SMALL = dict(zip(CAPTURED, (1.4, 1.4, 1.5, 1.7, 1.9, 2.1, 2.3, 2.5, 3.1, 4, 5.2, 8, 10.8), strict=True))


@pytest.mark.parametrize(
    ("prompts", "large", "small"),
    [
        ((3072,), [3072], [3072]),
        ((300,), [300], [300]),
        ((600,), [600], [600]),
        ((1100,), [1024, 76], [1100]),
        ((1200,), [1024, 176], [1200]),
        ((2500,), [2048, 452], [2048, 452]),
        ((4096, 1500), [4096, 1500], [4096, 1500]),
        ((128,) * 20, [2048, 512], [2048, 512]),
        ((8000,), [4096, 3072, 768, 64], [4096, 3904]),
    ],
)
def test_tokens_go_in_the_passes_that_take_the_least(
    prompts: tuple[int, ...], large: list[int], small: list[int]
) -> None:
    table, rows = SequenceTable(), []
    for key, size in enumerate(prompts):
        put(table, holding(request([1] * size), range(-(-size // PAGE_SIZE)), key))
        rows.append(Row(key, key, 0, size, True))
    for costs, expected in ((LARGE, large), (SMALL, small)):
        assert [one.tokens for one in passes(rows, table, costs, 1000)] == expected


@pytest.mark.parametrize(("tokens", "largest"), [(1, 16), (512, 512), (600, 768), (2048, 2048), (8192, 4096)])
def test_no_pass_is_captured_that_no_step_fills(tokens: int, largest: int) -> None:
    assert filled(CAPTURED, tokens) == CAPTURED[: CAPTURED.index(largest) + 1]
