"""Sizes the page pool and the longest sequence."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import Unsupported
from engine.kv.kv_cache import KvShape, stored_as
from engine.linear import Placement
from engine.settings import PAGE_SIZE, EngineSettings

CPU_MOST = 1 << 30  # bytes, unless the settings say more or one sequence needs more
CPU_SHARE = 0.25  # of free memory
CPU_ONE_SHARE = 0.5  # of free memory, for the pages of one sequence of the longest context
CUDA_SHARE = 0.90
CUDA_KEPT = 1 << 30  # bytes for activations
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Room:
    """`lacking` states what a whole context would take, where it has no room and no setting asked for less."""

    pages: int
    max_context: int  # tokens
    nbytes: int  # of all pages
    lacking: str | None = None


def make_room(
    settings: EngineSettings,
    sequences: int,
    model_context: int,
    shape: KvShape,
    placement: Placement,
    free_bytes: int,
    beside: int = 0,
) -> Room:
    """Pages for `sequences` of the longest context, within a share of `free_bytes` unless the settings give bytes.
    `beside`: bytes that a draft model keeps for each page. Raises Unsupported."""
    wanted = settings.max_context
    if wanted is not None and wanted > model_context:
        raise Unsupported(f"max_context {wanted}: the model was made for {model_context} tokens; ask for no more")
    context = wanted or model_context
    page_bytes = shape.page_bytes(stored_as(settings.kv_dtype, placement.dtype)) + beside
    whole = -(-context // PAGE_SIZE) * page_bytes  # of one sequence
    budget = settings.kv_bytes if settings.kv_bytes is not None else _share(free_bytes, placement, whole)
    enough = sequences * -(-context // PAGE_SIZE)
    pages = min(budget // page_bytes, enough)
    if pages < 1:
        raise Unsupported(f"kv_bytes {budget}: one page of {PAGE_SIZE} tokens takes {page_bytes} bytes; allow more")
    if wanted is not None and pages * PAGE_SIZE < wanted:
        raise Unsupported(f"max_context {wanted}: takes {whole} bytes of pages, {budget} are allowed; raise kv_bytes")
    held = min(context, pages * PAGE_SIZE)
    lacking = None
    if held < context and settings.kv_bytes is None:
        lacking = (
            f"a prompt and its answer may have {held:,} of the model's {context:,} tokens: keys and values of a whole "
            f"context take {whole / _GIB:.2f} GiB, and have {budget / _GIB:.2f} of the {free_bytes / _GIB:.2f} GiB "
            "that are free; --scheduler.kv-bytes gives them more"
        )
    return Room(pages, held, pages * page_bytes, lacking)


def _share(free: int, placement: Placement, whole: int) -> int:
    if placement.device.type == "cuda":
        return max(int(free * CUDA_SHARE) - CUDA_KEPT, 0)
    return max(min(CPU_MOST, int(free * CPU_SHARE)), min(whole, int(free * CPU_ONE_SHARE)))
