"""Which rows the device holds, and which half of a step comes next. Torch-free.

A step is fed, then chosen. What is fed needs the tokens before, which the device has itself; what is chosen needs a
mask of each row with a constraint, which the host makes once it knows these tokens. So the next step is fed before the
tokens of this one are read, and drawn as soon as they are read and its masks are made, before anyone is told of them:
the device waits for nobody as long as masks come before its layers end. A step moves every live row on by one token.

- Rows are written whole, never in part, and then fed anew. What was fed for rows that have since gone comes before
  anything later on the same stream, and what was fed for rows that stay is written again by what they are fed next.
- Where rows change, what was drawn for those that stay is drawn again: choices depend on seed and position alone.
- Nothing is fed that a row's pages do not reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

from engine.errors import EngineFailed
from engine.execution.graph_decode.pipeline import BUCKETS, NO_TOKEN, RowState
from engine.scheduling.plan import Row, RowResult
from engine.scheduling.sequence_state import SequenceState, SequenceTable
from engine.settings import PAGE_SIZE

MOST_ROWS = BUCKETS[-1]
_LAST_NUMBER = 1 << 30  # numbers begin anew above it
Mask = bytes | bytearray


class HalvesDevice(Protocol):
    """The device: every call but `poll` and `wait` is queued behind those before it."""

    def write(self, states: Rows[RowState], number: int) -> None:
        """These rows and no others. Entries are numbered from `number` + 1 on; 0: all numbers may come again."""

    def add_pages(self, index: int, first: int, pages: Rows[int]) -> None:
        """Pages [first, …) of a row."""

    def feed(self, longest: int) -> None:
        """The next step's tokens, of which none comes behind `longest` - 1 others."""

    def draw(self, masks: Mapping[int, Mask]) -> None:
        """What follows them, of what these allow the rows at these indexes."""

    def poll(self, index: int, number: int) -> int | None:
        """flags << 24 | token of a row's entry, None where it has not come."""

    def wait(self) -> None:
        """A moment. Raises where nothing is under way."""


class Grammar(Protocol):
    """What rows with a constraint may say."""

    def mask(self, key: int) -> Mask:
        """Returns the mask of that sequence's next token. Waits for the mask, but only briefly."""

    def ready(self, key: int) -> bool:
        """Returns whether the mask of that sequence's next token is there, or is worth a brief wait."""

    def take(self, rows: Rows[Row], found: dict[int, RowResult]) -> dict[int, RowResult]:
        """Moves on by these tokens; the same, with what is forced behind them."""


@dataclass(slots=True, eq=False)
class HalvesRow:
    """A row that the device holds."""

    sequence: SequenceState
    position: int  # of the token that the next step to be read feeds
    last: int  # position of its last token
    pages: int  # so many does the device know
    exchanges: int  # of the sequence's pages, when they were written
    ended: bool = False  # the device moves it no more

    def reaches(self, position: int) -> bool:
        """Whether its pages allow a token to be fed there, or none is."""
        return position < self.pages * PAGE_SIZE or position >= self.last


class HalvesPipeline:
    """The rows on the device, and whether their next tokens were fed."""

    def __init__(self, device: HalvesDevice, sequences: SequenceTable, max_context: int, grammar: Grammar) -> None:
        self._device = device
        self._sequences = sequences
        self._max_context = max_context
        self._grammar = grammar
        self._held: list[HalvesRow] = []
        self._number = 0  # of the last step that was drawn
        self._fed = False  # the tokens behind it, or where none is drawn yet, those that the next one begins with
        self._drawn = False  # a step that was not read

    def step(self, rows: Rows[Row]) -> dict[int, RowResult]:
        """One id for each row, or none; and what its constraint forces behind it."""
        try:
            held = self._agree(rows)
            if not self._drawn:
                self._draw(held)
            found = self._grammar.take(rows, self._receive(held))
            if self._same_go_on(held, found):
                self._draw(held)  # before the tokens before it are handed on
            return found
        except BaseException:
            self._held = []
            raise

    def _draw(self, held: Rows[HalvesRow]) -> None:
        if not self._fed:
            self._device.feed(1 + max(own.position for own in held))
        masked = {at: own.sequence.key for at, own in enumerate(held) if own.sequence.constraint is not None}
        masks = {at: self._grammar.mask(key) for at, key in masked.items()}
        self._number += 1
        self._device.draw(masks)
        self._drawn = True
        self._feed_ahead(held)

    def _same_go_on(self, held: Rows[HalvesRow], found: Mapping[int, RowResult]) -> bool:
        """Whether the next step should be of the same rows, and is fed."""
        one_each = all(len(result.token_ids) == 1 and result.end is None for result in found.values())
        if not self._fed or not one_each or any(own.ended for own in held):
            return False
        return all(self._grammar.ready(own.sequence.key) for own in held)

    def _agree(self, rows: Rows[Row]) -> list[HalvesRow]:
        """Makes the device's rows the plan's."""
        held = self._held
        if len(held) == len(rows) and all(self._continues(own, row) for own, row in zip(held, rows, strict=True)):
            for index, own in enumerate(held):
                known, pages = own.pages, own.sequence.pages
                if len(pages) > known:
                    self._device.add_pages(index, known, pages[known:])
                    own.pages = len(pages)
            return held
        if self._number > _LAST_NUMBER:
            self._number = 0
        held = self._held = [self._begin(row) for row in rows]
        self._device.write([RowState.of(own.sequence, own.position, own.last) for own in held], self._number)
        self._fed = self._drawn = False
        return held

    def _continues(self, own: HalvesRow, row: Row) -> bool:
        """Whether the device left the row where the plan takes it up."""
        sequence = self._sequences.of(row)
        there = own.sequence is sequence and own.exchanges == sequence.exchanges
        return there and not own.ended and own.position == row.start

    def _begin(self, row: Row) -> HalvesRow:
        sequence = self._sequences.of(row)
        last = sequence.last_position(self._max_context)
        return HalvesRow(sequence, row.start, last, len(sequence.pages), sequence.exchanges)

    def _feed_ahead(self, held: Rows[HalvesRow]) -> None:
        """Feeds the tokens that are being chosen, where one is of use and all pages reach."""
        after = [own.position + 1 for own in held if own.position + 1 < own.last]
        self._fed = bool(after) and all(own.reaches(own.position + 1) for own in held)
        if self._fed:
            self._device.feed(1 + max(after))

    def _receive(self, held: Rows[HalvesRow]) -> dict[int, RowResult]:
        """Waits for the step's tokens."""
        self._drawn = False
        found: dict[int, RowResult] = {}
        for index, own in enumerate(held):
            while (entry := self._device.poll(index, self._number)) is None:
                self._device.wait()
            own.position += 1
            own.ended = entry >> 24 != 0
            none = bool(entry >> 24 & NO_TOKEN)
            found[own.sequence.key] = RowResult(() if none else (entry & 0xFFFFFF,))
        if len(found) < len(held):
            raise EngineFailed("a sequence has two rows")
        return found
