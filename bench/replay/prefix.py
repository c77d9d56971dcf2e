"""Block traces through a prefix cache: how many of the blocks would have been found."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.replay.traces import TraceRequest


class PrefixIndex(Protocol):
    """Finds and keeps prefixes: `LruBlocks` here, the engine's own index in `bench.prefix`."""

    def match(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are held."""

    def insert(self, blocks: Sequence[int]) -> None: ...


class LruBlocks:
    """At most `capacity` blocks. The least recently used leaf goes first: a block counts as used after its children."""

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._held: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: Sequence[int]) -> int:
        count = next((i for i, block in enumerate(blocks) if block not in self._held), len(blocks))
        self._touch(blocks[:count])
        return count

    def insert(self, blocks: Sequence[int]) -> None:
        self._touch(blocks if self._capacity is None else blocks[: self._capacity])
        while self._capacity is not None and len(self._held) > self._capacity:
            self._held.popitem(last=False)

    def _touch(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._held[block] = None
            self._held.move_to_end(block)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReport:
    """Result for one trace and one capacity."""

    requests: int
    blocks: int
    hits: int
    shared_head: int  # hits on a first block that every request has

    @property
    def rate(self) -> float:
        """Share of blocks that were found."""
        return self.hits / self.blocks if self.blocks else 0.0

    @property
    def rate_beyond_head(self) -> float:
        """The same without the first block of each request, where all requests share it."""
        rest = self.blocks - self.requests if self.shared_head else self.blocks
        return (self.hits - self.shared_head) / rest if rest else 0.0


def replay_prefix(requests: Sequence[TraceRequest], index: PrefixIndex) -> PrefixReport:
    """One request after the other: matched, then inserted."""
    heads = {request.blocks[0] for request in requests if request.blocks}
    hits = head_hits = blocks = 0
    for request in requests:
        found = index.match(request.blocks)
        index.insert(request.blocks)
        hits += found
        head_hits += len(heads) == 1 and found > 0
        blocks += len(request.blocks)
    return PrefixReport(requests=len(requests), blocks=blocks, hits=hits, shared_head=head_hits)
