"""Keys and values of prompts, in runs of whole pages, and the store that outlives the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from cache.api.stores import BreakerState


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """Two engines share blocks only where every field is equal."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str  # as it is stored
    item_bytes: int
    page_size: int  # tokens
    variant: str = ""  # order of axes, rope, rank and size of a tensor-parallel group, attention backend

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.item_bytes


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Whole pages, identified by their place in the chain of hashes."""

    hash: bytes  # 32 bytes; of all tokens up to its end, and of all that shapes keys and values
    parent: bytes  # of the run before, or the chain's root
    tokens: int


@dataclass(frozen=True, slots=True)
class Fetched:
    runs: int  # that arrived, from the first on without a gap
    seconds: float


class BlockStore(Protocol):
    """Called from plain threads; nothing raises, and a fault is a miss."""

    @property
    def run_tokens(self) -> int:
        """Tokens of whole pages, about as many as the configured bytes hold."""

    def worth(self, tokens: int) -> float | None:
        """Seconds to wait at most for a fetch. None: computing is predicted to be faster."""

    def fetch(
        self, partition: str, runs: Sequence[BlockRun], into: Sequence[memoryview], within: float
    ) -> Future[Fetched]:
        """Fills the buffers, one a run. Until the future is done they may be written to."""

    def used(self, partition: str, run: BlockRun) -> bool:
        """Counts a use. True: worth writing, call `keep`."""

    def keep(self, partition: str, run: BlockRun, payload: memoryview) -> bool:
        """Copies, and writes in the background. False: dropped under pressure."""

    def computed(self, tokens: int, seconds: float) -> None:
        """Takes in the measured duration of a prefill, for `worth`."""

    def close(self) -> None: ...


class OpenBlockStore(BlockStore, Protocol):
    @property
    def states(self) -> Mapping[str, BreakerState]:
        pass
