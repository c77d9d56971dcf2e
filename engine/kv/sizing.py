"""How large the page pool is, and how long a sequence may therefore be."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import Unsupported
from engine.kv.kv_cache import KvShape, stored_as
from engine.linear import Placement
from engine.settings import PAGE_SIZE, EngineSettings

CPU_MOST = 1 << 30  # bytes, unless the settings say more
CPU_SHARE = 0.25  # of free memory
CUDA_SHARE = 0.90
CUDA_KEPT = 1 << 30  # bytes for activations


@dataclass(frozen=True, slots=True)
class Room:
    """What sequences may take."""

    pages: int
    max_context: int  # tokens


def make_room(
    settings: EngineSettings,
    sequences: int,
    model_context: int,
    shape: KvShape,
    placement: Placement,
    free_bytes: int,
    beside: int = 0,
) -> Room:
    """Pages for so many sequences of the longest context, as far as `free_bytes` of the device's memory go, unless the
    settings say how many bytes. `beside`: what a draft model keeps for each page, in bytes. Raises Unsupported."""
    wanted = settings.max_context
    if wanted is not None and wanted > model_context:
        raise Unsupported(f"max_context {wanted}: the model was made for {model_context} tokens; ask for no more")
    context = wanted or model_context
    page_bytes = shape.page_bytes(stored_as(settings.kv_dtype, placement.dtype)) + beside
    budget = settings.kv_bytes if settings.kv_bytes is not None else _share(free_bytes, placement)
    enough = sequences * -(-context // PAGE_SIZE)
    pages = min(budget // page_bytes, enough)
    if pages < 1:
        raise Unsupported(f"kv_bytes {budget}: one page of {PAGE_SIZE} tokens takes {page_bytes} bytes; allow more")
    if wanted is not None and pages * PAGE_SIZE < wanted:
        needed = -(-wanted // PAGE_SIZE) * page_bytes
        raise Unsupported(f"max_context {wanted}: takes {needed} bytes of pages, {budget} are allowed; raise kv_bytes")
    return Room(pages, min(context, pages * PAGE_SIZE))


def _share(free: int, placement: Placement) -> int:
    if placement.device.type == "cuda":
        return max(int(free * CUDA_SHARE) - CUDA_KEPT, 0)
    return min(CPU_MOST, int(free * CPU_SHARE))
