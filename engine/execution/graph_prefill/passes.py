"""How rows of several tokens are laid into passes: chunks side by side, as many as there is room for. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.errors import EngineFailed
from engine.scheduling.plan import Row
from engine.scheduling.sequence_state import SequenceState, SequenceTable
from engine.settings import PAGE_SIZE

MOST_CHUNKS = 32  # sequences of a pass
_LARGE = 2048  # tokens: a pass of so many takes twice as long as one of half the size, or nearly
TABLE = 4  # where the table of chunks begins, in words


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a sequence from position `start` on, and from `first` on in the pass."""

    row: Row
    sequence: SequenceState
    start: int
    ids: NDArray[np.int32]
    first: int

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + len(self.ids)

    @property
    def whole(self) -> bool:
        """Whether the row ends here."""
        return self.end == self.row.start + self.row.count


@dataclass(slots=True)
class Pass:
    """Chunks of different sequences."""

    chunks: list[Chunk] = field(default_factory=list)
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a pass of `size` tokens lie in what the device is sent, in words; its pages come last."""

    size: int
    chunks: int  # 1 or MOST_CHUNKS

    @property
    def ends(self) -> int:
        """The table of chunks of a pass that has the last token of each chunk alone."""
        return TABLE + 4 * self.chunks

    @property
    def ids(self) -> int:
        return self.ends + 4 * self.chunks

    @property
    def positions(self) -> int:
        return self.ids + self.size

    @property
    def owners(self) -> int:
        """For each token, where its sequence's pages begin."""
        return self.positions + self.size

    @property
    def pages(self) -> int:
        return self.owners + self.size

    def words(self, one: Pass) -> NDArray[np.int32]:
        """What the device is sent: the counts of tokens and chunks, the table of chunks (first token, count, position
        of the first, where its pages begin) and that of their ends, ids, positions, owners and pages."""
        held = [chunk.sequence.pages[: -(-chunk.end // PAGE_SIZE)] for chunk in one.chunks]
        words = np.zeros(self.pages + sum(map(len, held)), dtype=np.int32)
        words[0], words[1] = one.tokens, len(one.chunks)
        words[self.positions : self.owners] = -1
        row = 0  # of the pages
        for at, (chunk, pages) in enumerate(zip(one.chunks, held, strict=True)):
            count = len(chunk.ids)
            words[TABLE + 4 * at : TABLE + 4 * at + 4] = chunk.first, count, chunk.start, row
            words[self.ends + 4 * at : self.ends + 4 * at + 4] = at, 1, chunk.end - 1, row
            for part, values in (
                (self.ids, chunk.ids),
                (self.positions, np.arange(chunk.start, chunk.end)),
                (self.owners, row),
            ):
                words[part + chunk.first : part + chunk.first + count] = values
            words[self.pages + row : self.pages + row + len(pages)] = pages
            row += len(pages)
        return words


def passes(rows: Iterable[Row], sequences: SequenceTable, sizes: Rows[int], vocabulary: int) -> Iterator[Pass]:
    """All tokens of the rows, in their order. `sizes`: tokens of a captured pass, smallest first."""
    rows = tuple(rows)
    left = sum(row.count for row in rows)
    here, room = Pass(), _room(sizes, left)
    for row in rows:
        sequence, start, end = sequences.of(row), row.start, row.start + row.count
        ids = _checked(sequence.token_ids[start:end], vocabulary)
        while start < end:
            if here.tokens == room or len(here.chunks) == MOST_CHUNKS:
                yield here
                here, room = Pass(), _room(sizes, left)
            count = min(end - start, room - here.tokens)
            fed = start - row.start
            here.chunks.append(Chunk(row, sequence, start, ids[fed : fed + count], here.tokens))
            here.tokens += count
            start += count
            left -= count
    if here.chunks:
        yield here


def _room(sizes: Rows[int], left: int) -> int:
    """Of the next pass, when so many tokens are left. A large one filled to three quarters takes longer than two
    smaller ones."""
    at = next((at for at, size in enumerate(sizes) if size >= left), len(sizes) - 1)
    return sizes[at - 1] if at > 0 and sizes[at] >= _LARGE and 4 * left <= 3 * sizes[at] else sizes[at]


def _checked(ids: Rows[int], vocabulary: int) -> NDArray[np.int32]:
    found = np.array(ids, dtype=np.int64)
    if found.view(np.uint64).max() >= vocabulary:  # one below zero is larger than any as well
        # On a GPU the lookup itself would take the whole process down.
        raise EngineFailed("a token id lies outside the vocabulary")
    return found.astype(np.int32)
