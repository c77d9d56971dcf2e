"""A model that is split over ranks keeps the contract of executors: the ids of one process, whoever runs beside."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from engine.api import Constraint, GenerationRequest
from engine.execution.registry import EXECUTORS
from engine.execution.speculation.eager_executor import Speculation
from engine.worker.build import make_runner, prepare
from engine.worker.offers import PLAIN_TRIAL
from tests.contract.answers import FREE, alone, generate, requests
from tests.engine.execution.counting import counting
from tests.engine.quantized import nothing, settings
from tests.engine.worker.split_threads import split_runner

pytestmark = pytest.mark.product

EAGER = EXECUTORS[-1]
DRAFTED = replace(EXECUTORS[-2], make=lambda parts: Speculation(parts, known=FREE))  # verifies whatever is guessed
GIVEN: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "max_sequences": 16, "kv_bytes": 16 << 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(dict(PLAIN_TRIAL)))
    return made


def constrained(asked: list[GenerationRequest]) -> list[GenerationRequest]:
    return [structs.replace(one, constraint=None if at % 2 else Constraint("")) for at, one in enumerate(asked)]


@pytest.mark.parametrize(
    ("ranks", "count"), [(2, 8), *(pytest.param(ranks, 16, marks=pytest.mark.proof) for ranks in (2, 4))]
)
def test_its_ids_are_those_of_one_process(ranks: int, count: int, folder: Path) -> None:
    """With prompts in chunks, rows that lose their pages, drafts and constraints."""
    chosen = settings(folder, **GIVEN)
    whole = make_runner(chosen, prepare(chosen, nothing, counting(320)), nothing, (EAGER,))
    asked, long = constrained(requests(count)), alone()
    expected = {one: generate(whole, [one], 128, 512)[one.request_id].ids for one in (*asked, *long)}
    whole.close()
    split, threads = split_runner(folder, ranks, counting(320), (DRAFTED, EAGER), **GIVEN)
    for batch, pages, budget, apart in (
        (long, 128, 512, 0),
        (asked[:8], 128, 512, 0),
        (asked[:8][::-1], 128, 7, 0),  # prompts in chunks
        (asked[:8], 17, 32, 0),  # rows lose their pages and come back
        (asked[::-1], 256, 64, 3),  # they come and go
    ):
        found = generate(split, batch, pages, budget, apart)
        assert {one: found[one.request_id].ids for one in batch} == {one: expected[one] for one in batch}
    split.close()
    assert not threads.failures


def test_pages_of_a_split_model_are_those_of_one_process(folder: Path) -> None:
    """So servers with and without ranks share what prompts begin with."""
    chosen = settings(folder, **GIVEN)
    whole = make_runner(chosen, prepare(chosen, nothing), nothing, (EAGER,))
    split, threads = split_runner(folder, 4, **GIVEN)
    (asked,) = [one for one in requests(8) if len(one.token_ids) == 64]
    expected = generate(whole, [asked], 128, 512)
    assert whole.pages.layout == split.pages.layout
    for source, target in ((whole, split), (split, whole)):
        assert generate(source, [asked], 128, 512)[asked.request_id].ids == expected[asked.request_id].ids
        size = 4 * 16 * source.pages.layout.token_bytes
        pages, other = source.pages.buffer(size), target.pages.buffer(size)
        source.pages.read([0, 1, 2, 3], pages)
        generate(target, [asked], 128, 512)
        target.pages.read([0, 1, 2, 3], other)
        numbers = [torch.frombuffer(one, dtype=torch.float32) for one in (pages, other)]
        torch.testing.assert_close(numbers[0], numbers[1], rtol=0, atol=1e-4)
        target.pages.write([9, 7, 11, 8], pages)
        target.pages.read([9, 7, 11, 8], other)
        assert bytes(other) == bytes(pages)
    whole.close()
    split.close()
    assert not threads.failures
