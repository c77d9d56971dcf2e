"""How many pages there are, and what is said where a whole context has no room."""

from __future__ import annotations

import pytest
import torch

from engine.errors import Unsupported
from engine.kv.kv_cache import KvShape
from engine.kv.sizing import CPU_MOST, CUDA_KEPT, Room, make_room
from engine.linear import Placement
from engine.settings import PAGE_SIZE, EngineSettings

GIB = 1 << 30
SHAPE = KvShape(layers=28, kv_heads=8, head_dim=128)
TOKEN = 2 * 28 * 8 * 128 * 2  # bytes, in bfloat16: 112 KiB
CONTEXT = 40_960  # takes 4.375 GiB


def room(free: float, context: int = CONTEXT, device: str = "cpu", sequences: int = 64, **settings: object) -> Room:
    placement = Placement(torch.bfloat16, torch.device(device))
    given = EngineSettings(model="m", **settings)  # type: ignore[arg-type]
    return make_room(given, sequences, context, SHAPE, placement, int(free * GIB))


@pytest.mark.parametrize("free", [9, 20, 64])
def test_a_cpu_holds_a_whole_context_where_memory_allows(free: float) -> None:
    found = room(free)
    assert (found.max_context, found.lacking) == (CONTEXT, None)
    assert found.nbytes == found.pages * PAGE_SIZE * TOKEN == CONTEXT * TOKEN


def test_short_contexts_have_many_sequences_within_the_usual_bound() -> None:
    found = room(64, context=2048)
    assert found.max_context == 2048
    assert CPU_MOST - PAGE_SIZE * TOKEN < found.nbytes <= CPU_MOST
    assert room(64, context=512, sequences=2).pages == 2 * 512 // PAGE_SIZE


def test_what_is_short_is_said_in_tokens_and_in_gibibytes() -> None:
    found = room(6)
    assert found.max_context == found.pages * PAGE_SIZE < CONTEXT
    assert found.nbytes <= 3 * GIB
    assert found.lacking is not None
    for part in (f"{found.max_context:,} of the model's 40,960 tokens", "4.38 GiB", "3.00 of the 6.00 GiB", "kv-bytes"):
        assert part in found.lacking


def test_who_asked_for_less_is_not_warned() -> None:
    assert room(6, max_context=4096).lacking is None
    assert room(6, kv_bytes=GIB).lacking is None


def test_a_gpu_takes_nearly_all() -> None:
    found = room(10, device="cuda")
    assert found.nbytes > 0.9 * 10 * GIB - CUDA_KEPT - PAGE_SIZE * TOKEN
    assert found.lacking is None
    assert room(4, device="cuda").lacking is not None


def test_no_room_at_all() -> None:
    with pytest.raises(Unsupported, match="one page of 16 tokens"):
        room(0.0001)
    with pytest.raises(Unsupported, match="max_context 40960: takes"):
        room(2, max_context=CONTEXT)
