"""Shared prefixes on a GPU: pages as bytes and back, and conversations with whatever executors the GPU gets."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kv.kv_cache import KvCache, KvShape
from engine.kv.page_pool import PagePool
from engine.kv.page_transfer import PoolPages
from engine.kv.prefix_index import PrefixIndex
from engine.linear import Placement
from engine.scheduling.limits import Limits
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.settings import EngineSettings
from engine.worker.build import build

pytestmark = pytest.mark.gpu

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pages_leave_a_card_and_come_back(dtype: torch.dtype) -> None:
    shape = KvShape(layers=3, kv_heads=2, head_dim=64)
    source, target = (KvCache(shape, 12, Placement(dtype, torch.device("cuda")), heads_outside=False) for _ in range(2))
    for layer in range(shape.layers):
        source.layer(layer).normal_()
    out, back = PoolPages(source), PoolPages(target)
    buffer = out.buffer(3 * shape.page_bytes(dtype))
    out.read([7, 2, 3], buffer)
    back.write([0, 11], buffer[: len(buffer) // 3 * 2])
    back.write([5], buffer[len(buffer) // 3 * 2 :])
    for layer in range(shape.layers):
        assert torch.equal(target.layer(layer)[:, [0, 11, 5]], source.layer(layer)[:, [7, 2, 3]])
        assert not target.layer(layer)[:, [1, 2, 3, 4, 6, 7, 8, 9, 10]].any()


@pytest.mark.parametrize(("dtype", "exact"), [("float32", True), ("bfloat16", False)])
def test_conversations_with_and_without(tmp_path: Path, request_of: Any, dtype: Any, exact: bool) -> None:
    """In half precision a prompt fed in other pieces may round otherwise: there it must only run and find."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "dtype": dtype}))
    settings = EngineSettings(
        model=str(tmp_path), load_format="dummy", device="cuda", dtype=dtype, max_sequences=4, kv_bytes=64 << 20
    )
    runner = build(settings, lambda stage, done, total: None)
    told = []
    for prefix in (True, False):
        rng = random.Random(3)
        head = [rng.randrange(512) for _ in range(300)]
        limits = Limits(
            max_sequences=4,
            max_batch_tokens=128,
            max_context=1024,
            lookahead_tokens=runner.info.lookahead_tokens,
            max_tokens_per_row=runner.info.max_tokens_per_row,
        )
        pool = PagePool(128)
        scheduler = Scheduler(limits, pool, prefixes=PrefixIndex(pool, enabled=prefix))
        texts = [[*head, who] for who in range(4)]
        key = cached = 0
        for turn in range(3):
            owners = {}
            for text in texts:
                key += 1
                owners[key] = text
                request = request_of(text, 40)
                scheduler.admit(Sequence(request, list(text), key=key))
            while (plan := scheduler.plan(0.0)) is not None:
                for event in scheduler.commit(plan, runner.run(plan), 0.0):
                    assert event.failure is None
                    owners[event.key] += event.token_ids
                    cached += event.start.cached_tokens if event.start is not None else 0
            for text in texts:
                text.append(turn)
        assert (cached > 2000) is prefix
        assert scheduler.load.used_pages == 0
        told.append(texts)
    runner.close()
    if exact:
        assert told[0] == told[1]
