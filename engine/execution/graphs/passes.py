"""Packs rows of several tokens into passes: chunks side by side, as many as there is room for. Torch-free."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.execution.needs import require_known
from engine.scheduling.plan import Row
from engine.scheduling.sequence_state import SequenceState, SequenceTable
from engine.settings import PAGE_SIZE

MOST_CHUNKS = 32  # sequences of a pass
_APART = 1.05  # what two passes take by the sum of their costs, about: the host comes between, and costs are not exact
TABLE = 4  # where the table of chunks begins, in words


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Holds tokens that begin at position `start` of the sequence, and at `first` in the pass."""

    row: Row
    sequence: SequenceState
    start: int
    ids: NDArray[np.int32]
    first: int

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def whole(self) -> bool:
        """Returns whether the row ends with this chunk."""
        return self.end == self.row.start + self.row.count


@dataclass(slots=True)
class Pass:
    chunks: list[PromptChunk] = field(default_factory=list)
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class PassLayout:
    """Says at which word of its message to the device each part of a pass begins."""

    size: int
    chunks: int  # 1 or MOST_CHUNKS

    @property
    def ends(self) -> int:
        """Begins a second table of chunks, each with its last token alone."""
        return TABLE + 4 * self.chunks

    @property
    def ids(self) -> int:
        return self.ends + 4 * self.chunks

    @property
    def positions(self) -> int:
        return self.ids + self.size

    @property
    def owners(self) -> int:
        """Says for each token where its sequence's pages begin."""
        return self.positions + self.size

    @property
    def pages(self) -> int:
        return self.owners + self.size

    def words(self, one: Pass) -> NDArray[np.int32]:
        """Returns the message: counts of tokens and chunks, the table of chunks (first token, count, position of the
        first, where its pages begin), `ends`, `ids`, `positions`, `owners`, `pages`."""
        held = [chunk.sequence.pages[: -(-chunk.end // PAGE_SIZE)] for chunk in one.chunks]
        ends, ids, positions, owners, first_page = self.ends, self.ids, self.positions, self.owners, self.pages
        words = np.zeros(first_page + sum(map(len, held)), dtype=np.int32)
        words[0], words[1] = one.tokens, len(one.chunks)
        words[positions:owners] = -1
        row = 0  # of the pages
        for at, (chunk, pages) in enumerate(zip(one.chunks, held, strict=True)):
            first, last, start, end = chunk.first, chunk.first + len(chunk.ids), chunk.start, chunk.end
            words[TABLE + 4 * at : TABLE + 4 * at + 4] = first, last - first, start, row
            words[ends + 4 * at : ends + 4 * at + 4] = at, 1, end - 1, row
            words[ids + first : ids + last] = chunk.ids
            words[positions + first : positions + last] = np.arange(start, end, dtype=np.int32)
            words[owners + first : owners + last] = row
            words[first_page + row : first_page + row + len(pages)] = pages
            row += len(pages)
        return words


def passes(
    rows: Iterable[Row], sequences: SequenceTable, costs: Mapping[int, float], vocabulary: int
) -> Iterator[Pass]:
    """Yields all tokens of the rows, in order. `costs`: seconds of a pass by its tokens, smallest first."""
    rows = tuple(rows)
    left = sum(row.count for row in rows)
    here, room = Pass(), cheapest(costs, left)[1]
    for row in rows:
        sequence, start, end = sequences.of(row), row.start, row.start + row.count
        ids = _checked(sequence.token_ids[start:end], vocabulary)
        while start < end:
            if here.tokens == room or len(here.chunks) == MOST_CHUNKS:
                yield here
                here, room = Pass(), cheapest(costs, left)[1]
            count = min(end - start, room - here.tokens)
            fed = start - row.start
            here.chunks.append(PromptChunk(row, sequence, start, ids[fed : fed + count], here.tokens))
            here.tokens += count
            start += count
            left -= count
    if here.chunks:
        yield here


def cheapest(costs: Mapping[int, float], tokens: int) -> tuple[float, int]:
    """Returns the cost, and the size of the first pass: one that holds all tokens, or the largest that they fill."""
    sizes = tuple(costs)
    at = bisect_left(sizes, tokens)
    whole = (costs[sizes[at]], sizes[at]) if at < len(sizes) else (math.inf, 0)
    if at == 0:
        return whole
    filled = sizes[at - 1]
    return min(whole, (_APART * (costs[filled] + cheapest(costs, tokens - filled)[0]), filled))


def _checked(ids: Rows[int], vocabulary: int) -> NDArray[np.int32]:
    found = np.array(ids, dtype=np.int64)
    require_known((int(found.view(np.uint64).max()),), vocabulary)  # an id below zero is larger than any other
    return found.astype(np.int32)
