"""What shared prefixes save: time to first token, hits on a trace by capacity, and what the gate decides. Tables, and
one JSON line.

    python -m bench.prefix --model models/demo --trace mooncake_conversation.jsonl.gz

Time to first token is of the engine's own loop without its socket, greedy, median of the rounds. A shared prefix of
512 tokens comes with another question behind it each time: computed whole, found on the device, and fetched from Redis
by an engine that was just started. Needs `redis-server` in the path.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from engine.fake import plain_request
from engine.pages import PagePool
from engine.prefix import PrefixIndex
from engine.sequence import Sequence
from engine.settings import PAGE_SIZE


class DevicePages:
    """The engine's own index under a trace whose blocks stand for pages: what `cache.replay` asks for."""

    def __init__(self, capacity: int) -> None:
        self._pool = PagePool(capacity)
        self._index = PrefixIndex(self._pool)

    def match(self, blocks: Items[int]) -> int:
        """How many leading blocks are held."""
        return len(self._index.find(self._sequence(blocks)))

    def insert(self, blocks: Items[int]) -> None:
        """As a sequence that computes them all and ends."""
        sequence = self._sequence(blocks[: self._pool.total])
        self._index.begin(sequence, self._index.find(sequence))
        whole = len(sequence.token_ids) // PAGE_SIZE
        sequence.pages += self._index.allocate(whole - len(sequence.pages)) or []
        sequence.advance(len(sequence.pages) * PAGE_SIZE)
        self._index.note(sequence)
        self._index.release(sequence)

    @staticmethod
    def _sequence(blocks: Items[int]) -> Sequence:
        """One page a block, and a token behind them."""
        ids = [block for block in blocks for _ in range(PAGE_SIZE)]
        return Sequence(plain_request((*ids, 0)), [*ids, 0])
