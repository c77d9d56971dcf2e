"""Pages of the real pool: as bytes and back, and answers that do not change with who computed them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.api import GenerationRequest
from engine.execution.runner import ModelRunner
from engine.kv.kv_cache import KvCache, KvShape
from engine.kv.page_pool import PagePool
from engine.kv.page_transfer import PoolPages
from engine.kv.prefix_index import PrefixIndex
from engine.linear import Placement
from engine.model.attention import RowSpan, key_range
from engine.scheduling.limits import Limits
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.settings import EngineSettings
from engine.worker.build import build

SHAPE = KvShape(layers=3, kv_heads=2, head_dim=8)


E4M3 = torch.float8_e4m3fn


def pool(dtype: torch.dtype, heads_outside: bool, pages: int = 12) -> KvCache:
    """Of random numbers, e4m3 where arithmetic is in bfloat16."""
    made = KvCache(
        SHAPE, pages, Placement(torch.bfloat16 if dtype == E4M3 else dtype, torch.device("cpu")), heads_outside, dtype
    )
    generator = torch.Generator().manual_seed(pages)
    for layer in range(SHAPE.layers):
        values = torch.randn(made.layer(layer).shape, generator=generator)
        made.layer(layer).copy_(values.to(E4M3).view(torch.uint8) if dtype == E4M3 else values)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, E4M3])
@pytest.mark.parametrize("outside", [(True, True), (True, False), (False, True), (False, False)])
def test_pages_come_back_as_they_went(dtype: torch.dtype, outside: tuple[bool, bool]) -> None:
    source, target = pool(dtype, outside[0]), pool(dtype, outside[1], 20)
    before = [target.layer(layer).clone() for layer in range(SHAPE.layers)]
    out, back = PoolPages(source), PoolPages(target)
    taken, given = [7, 2, 3, 11], [0, 19, 4, 9]
    buffer = out.buffer(4 * SHAPE.page_bytes(dtype))
    assert len(buffer) == 4 * 16 * out.layout.token_bytes
    out.read(taken, buffer)
    back.write(given[:1], buffer[: len(buffer) // 4])
    back.write(given[1:], buffer[len(buffer) // 4 :])
    for layer in range(SHAPE.layers):
        assert torch.equal(target.layer(layer)[:, given], source.layer(layer)[:, taken])
        others = [page for page in range(20) if page not in given]
        assert torch.equal(target.layer(layer)[:, others], before[layer][:, others]), "another page was written to"
    # What Redis holds is what the layout says, whoever wrote it.
    again = PoolPages(pool(dtype, not outside[0]))
    other = again.buffer(len(buffer))
    again.read(taken, other)
    assert bytes(other) == bytes(buffer)


def test_layouts_differ_where_bytes_do() -> None:
    first = PoolPages(pool(torch.bfloat16, True)).layout
    assert first == PoolPages(pool(torch.bfloat16, False)).layout
    assert first != PoolPages(pool(torch.float16, True)).layout
    assert first != PoolPages(pool(E4M3, True)).layout
    assert PoolPages(pool(E4M3, True)).layout.token_bytes * 2 == first.token_bytes
    assert "cpu" in first.variant


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 5, 40, 70])
@pytest.mark.parametrize(
    "pages", [[3, 4, 5, 6, 7, 8], [0, 1, 2, 9, 10, 11], [4, 5, 1, 2, 8, 9], [1, 3, 5, 6, 9, 10], [9, 7, 5, 3, 1, 0]]
)
def test_keys_in_several_runs_give_what_one_run_gives(dtype: torch.dtype, window: int | None, pages: list[int]) -> None:
    made = pool(dtype, heads_outside=True)
    query = torch.randn(1, SHAPE.kv_heads, 3, SHAPE.head_dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    for start in (81, 90, 95):
        span = RowSpan(0, 1, start, pages)
        keys, values = (part.transpose(0, 1).flatten(1, 2)[:, : start + 1] for part in made.layer(1)[:, pages])
        low = 0 if window is None else start - window + 1
        scores = query[0].double() @ keys[:, low:].double().transpose(1, 2) / SHAPE.head_dim**0.5
        expected = scores.softmax(-1) @ values[:, low:].double()
        for whole in (True, False):
            found = key_range(span, window, made, torch.device("cpu"), whole)
            assert found.attend(made, 1, query).dtype == dtype
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(found.attend(made, 1, query)[0].double(), expected, rtol=0, atol=tolerance)
            if pages == [4, 5, 1, 2, 8, 9] and window is None and not whole:
                assert found.runs == ((64, 32), (16, 32), (128, start - 63))


CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "use_sliding_window": True,
    "sliding_window": 40,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "tie_word_embeddings": True,
    "dtype": "float32",
}


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    settings = EngineSettings(
        model=str(tmp_path), load_format="dummy", device="cpu", max_sequences=4, threads=1, kv_bytes=2 << 20
    )
    return build(settings, lambda stage, done, total: None)


class Talk:
    """The engine's loop over the real runner."""

    def __init__(self, runner: ModelRunner, pages: int, budget: int, prefix: bool) -> None:
        self.runner = runner
        info = runner.info
        limits = Limits(
            max_sequences=4,
            max_batch_tokens=budget,
            max_context=min(512, pages * 16),
            lookahead_tokens=info.lookahead_tokens,
            max_tokens_per_row=info.max_tokens_per_row,
        )
        pool = PagePool(pages)
        self.scheduler = Scheduler(limits, pool, prefixes=PrefixIndex(pool, enabled=prefix))
        self.key = 0
        self.cached = 0

    def ask(self, requests: list[GenerationRequest]) -> list[tuple[int, ...]]:
        first = self.key + 1
        found: dict[int, tuple[int, ...]] = {}
        for request in requests:
            self.key += 1
            found[self.key] = ()
            self.scheduler.admit(Sequence(request, list(request.token_ids), key=self.key))
        while (plan := self.scheduler.plan(0.0)) is not None:
            for event in self.scheduler.commit(plan, self.runner.run(plan), 0.0):
                found[event.key] += event.token_ids
                self.cached += event.start.cached_tokens if event.start is not None else 0
                assert event.failure is None
        return [found[key] for key in range(first, self.key + 1)]


@pytest.mark.parametrize(("pages", "budget"), [(128, 512), (24, 48)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_are_those_without_the_cache(
    runner: ModelRunner, request_of: Any, pages: int, budget: int, temperature: float
) -> None:
    """Turns of four conversations with one head, side by side; the small pool preempts and evicts."""
    rng = random.Random(3)
    head = [rng.randrange(200) for _ in range(70)]
    answers = []
    for prefix in (True, False):
        talk = Talk(runner, pages, budget, prefix)
        texts = [[*head, who] for who in range(4)]
        told = []
        for turn in range(3):
            requests = [
                request_of(text, 20, temperature=temperature, seed=who, repetition_penalty=1.2)
                for who, text in enumerate(texts)
            ]
            said = talk.ask(requests)
            told.append(said)
            for text, new in zip(texts, said, strict=True):
                text += [*new, turn]
        answers.append(told)
        assert (talk.cached > 0) is prefix
        assert talk.scheduler.load.used_pages == 0
    assert answers[0] == answers[1]
