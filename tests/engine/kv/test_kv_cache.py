"""Keys and values as they lie and as they are read, in every layout, in their own type and as fp8."""

from __future__ import annotations

import pytest
import torch

from engine.kv.kv_cache import KvCache, KvShape, stored_as
from engine.linear import Placement

SHAPE = KvShape(layers=2, kv_heads=3, head_dim=8)
E4M3 = torch.float8_e4m3fn
EVERY = torch.arange(256, dtype=torch.uint8)[torch.arange(256) % 128 < 127].view(E4M3)  # but NaN


def made(kept: torch.dtype | None, heads_outside: bool, computed: torch.dtype = torch.bfloat16) -> KvCache:
    return KvCache(SHAPE, 6, Placement(computed, torch.device("cpu")), heads_outside, kept)


def fresh(cache: KvCache, slots: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Random keys and values, put at the slots of layer 1."""
    generator = torch.Generator().manual_seed(1)
    values = scale * torch.randn(len(slots), 2 * SHAPE.kv_heads, SHAPE.head_dim, generator=generator)
    cache.write(1, slots, values := values.to(cache.placement.dtype if cache.stored != E4M3 else torch.bfloat16))
    return values


@pytest.mark.parametrize("heads_outside", [True, False])
@pytest.mark.parametrize("kept", [None, torch.bfloat16, E4M3])
def test_what_was_written_is_read(kept: torch.dtype | None, heads_outside: bool) -> None:
    cache, slots = made(kept, heads_outside), torch.tensor([5, 16, 31, 32, 40, 95, 0])
    before = cache.layer(0).view(torch.uint8).clone()
    values = fresh(cache, slots)
    expected = values.to(E4M3).bfloat16() if kept == E4M3 else values
    pages = torch.tensor([5, 0, 2, 1])
    for part, found in enumerate(cache.gather(1, pages)):
        assert found.shape == (1, SHAPE.kv_heads, len(pages) * 16, SHAPE.head_dim)
        assert found.dtype == torch.bfloat16
        for at, slot in enumerate(slots.tolist()):
            if slot // 16 in pages.tolist():
                place = pages.tolist().index(slot // 16) * 16 + slot % 16
                heads = expected[at].view(2, SHAPE.kv_heads, SHAPE.head_dim)[part]
                assert torch.equal(found[0, :, place], heads)
                if heads_outside:
                    assert torch.equal(cache.run(1, slot, 1)[part][0, :, 0], heads)
    assert torch.equal(cache.layer(0).view(torch.uint8), before), "another layer was written to"


@pytest.mark.parametrize("heads_outside", [True, False])
def test_fp8_rounds_to_nearest_and_knows_no_infinity(heads_outside: bool) -> None:
    cache = made(E4M3, heads_outside, torch.float32)
    most = torch.tensor([448.0, 449.0, 1e6, float("inf"), -465.0, -1e30, 464.0, 0.0])
    given = most.repeat(1, 2 * SHAPE.kv_heads, 1)
    cache.write(0, torch.tensor([3]), given)
    keys, _ = cache.gather(0, torch.tensor([0]))
    assert keys[0, 0, 3].tolist() == [448.0, 448.0, 448.0, 448.0, -448.0, -448.0, 448.0, 0.0]
    ordered = EVERY.float().unique()  # each number there is
    for way, share in ((0, 0.49), (1, 0.51)):
        between = ordered[:-1] + share * ordered.diff()
        at = torch.arange(0, len(between) - 7, 8)
        cache.write(0, torch.arange(len(at)), between[: 8 * len(at)].view(-1, 1, 8).repeat(1, 2 * SHAPE.kv_heads, 1))
        keys, _ = cache.gather(0, torch.arange(6))
        assert torch.equal(keys[0, 0, : len(at)].flatten(), ordered[way:][: 8 * len(at)])


def test_fp8_takes_a_byte() -> None:
    assert stored_as("auto", torch.bfloat16) == torch.bfloat16
    assert stored_as("fp8", torch.bfloat16) == E4M3
    assert made(E4M3, heads_outside=True).nbytes * 2 == made(None, heads_outside=True).nbytes
    assert SHAPE.page_bytes(E4M3) * 2 == SHAPE.page_bytes(torch.bfloat16)
    assert SHAPE.page_bytes(E4M3) * 6 == made(E4M3, heads_outside=False).nbytes
