"""What a decoder is made from."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv.kv_cache import KvCache
from engine.model.transformer import Transformer
from engine.sampling.sampler import Sampler


class Unfit(Exception):
    """A decoder found while it was made that it cannot serve here; says why in one line."""


@dataclass(frozen=True, slots=True)
class Parts:
    """One loaded model and the state that its decoders share."""

    model: Transformer
    pool: KvCache
    sampler: Sampler
    max_sequences: int
    max_context: int  # tokens
