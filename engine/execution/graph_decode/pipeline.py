"""Which rows the device holds, how many steps are launched ahead of their tokens, and when the rows' state must be
written anew.

Steps are launched before the tokens of earlier ones were read, as long as the plans go on as expected. Torch-free.

- A step moves every live row of the device on by one token, so all stand equally far.
- Steps are launched only within `step`, after the device's rows were made to agree with the plan's, and never beyond
  the pages of a row. What was launched for rows that have since gone comes before anything later on the same stream: a
  page that went to another owner is written by the old one's steps first, and by the new one's after that.
- Rows are written whole, never in part, after all that was launched for rows that stay has been read.
- An entry of the device's ring has a number, and none comes twice, so that what earlier rows left is never taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Protocol

from engine.errors import EngineFailed
from engine.sampling.noise import seed_key
from engine.scheduling.plan import Row, RowResult
from engine.scheduling.sequence_state import SequenceState, SequenceTable
from engine.settings import PAGE_SIZE

BUCKETS = (1, 2, 4, 8)  # rows that a captured step moves
SIZES = (4, 1)  # steps of a launch, largest first
AHEAD = 8  # steps launched and not yet read, at most
LEAD = 4e-3  # seconds that they should last: the host is late at times, and a prompt that comes waits for them
FIRST_AHEAD = 2  # right after rows came or went; doubles with every call
LOW = 2  # steps under way, below which small launches are made rather than none
NO_TOKEN = 4  # flag of an entry; any other flag ends its row as well
_LAST_NUMBER = 1 << 30  # numbers begin anew above it


@dataclass(frozen=True, slots=True)
class RowState:
    """A row as the device is told of it."""

    token: int  # to be fed
    position: int  # of that token
    last_position: int  # a token placed there is the row's last
    stops: tuple[int, ...]
    temperature: float
    noise_key: int
    pages: tuple[int, ...]
    sequence: SequenceState
    unreported: tuple[int, ...]  # tokens that no result has brought yet

    @classmethod
    def of(cls, sequence: SequenceState, position: int, last: int, unreported: Rows[int] = ()) -> RowState:
        """Of a sequence whose token at `position` is to be fed: the last of those unreported, where there are any."""
        return cls(
            token=unreported[-1] if unreported else sequence.token_ids[position],
            position=position,
            last_position=last,
            stops=sequence.stopping.stop_token_ids,
            temperature=sequence.sampling.temperature,
            noise_key=seed_key(sequence.sampling.seed),
            pages=tuple(sequence.pages),
            sequence=sequence,
            unreported=tuple(unreported),
        )


class StepDevice(Protocol):
    """The device: every call but `poll` and `wait` is queued behind those before it."""

    def write(self, states: Rows[RowState], number: int) -> None:
        """These rows and no others. Entries are numbered from `number` + 1 on; 0: all numbers may come again."""

    def add_pages(self, index: int, first: int, pages: Rows[int]) -> None:
        """Pages [first, …) of a row."""

    def launch(self, steps: int, longest: int) -> None:
        """Steps of all rows; none of them will hold more than `longest` tokens."""

    def poll(self, index: int, number: int) -> int | None:
        """flags << 24 | token of a row's entry, None where it has not come."""

    def wait(self) -> None:
        """A moment. Raises where nothing is under way."""


@dataclass(slots=True, eq=False)
class PipelineRow:
    """A row that the device holds."""

    sequence: SequenceState
    index: int  # among the device's rows
    first: int  # position of the token that it was written with
    last: int  # position of its last token
    pages: int  # so many does the device know
    exchanges: int  # of the sequence's pages, when they were written
    unreported: list[int] = field(default_factory=list)  # read from the device, in no result yet
    ended: bool = False  # the device moves it no more

    @property
    def room(self) -> int:
        """Steps that its pages allow, and one more than it needs where they suffice to its end."""
        held = self.pages * PAGE_SIZE
        return (held if held < self.last else 1 << 30) - self.first


def bucket(rows: int) -> int:
    """The smallest batch bucket for so many rows."""
    return next(size for size in BUCKETS if size >= rows)


def ahead_of(seconds: float) -> int:
    """How many steps that take so long are launched ahead."""
    return min(max(LOW, math.ceil(LEAD / seconds)), AHEAD)


class DecodePipeline:
    """The rows on the device and the steps under way."""

    def __init__(
        self, device: StepDevice, sequences: SequenceTable, max_context: int, sizes: tuple[int, ...] = SIZES
    ) -> None:
        self._device = device
        self._sequences = sequences
        self._max_context = max_context
        self._sizes = sizes
        self.most_ahead: Mapping[int, int] = dict.fromkeys(BUCKETS, AHEAD)  # by bucket
        self._held: list[PipelineRow] = []
        self._bucket = 0  # rows that the device moves, in use or not
        self._number = 0  # of the last entry before the rows were written
        self._launched = 0  # steps since then
        self._read = 0  # of them, whose tokens were read
        self._ahead = FIRST_AHEAD

    def under_way(self, rows: Rows[Row]) -> list[Row]:
        """Those of the rows that steps under way move on from where the plan takes them up."""
        if not self._held or self._launched == self._read:
            return []
        by_key = {own.sequence.key: own for own in self._held if not own.ended}
        return [row for row in rows if (own := by_key.get(row.key)) is not None and self._continues(own, row)]

    def drain(self, rows: Rows[Row]) -> dict[int, RowResult]:
        """All that is under way for these rows, and at least one id for each; they then leave."""
        try:
            kept = self._settle(rows)
            held = list(kept.values())
            if len(kept) < len(rows) or not all(own.unreported or own.ended for own in held):
                held = self._write(rows, kept)
                self._ahead = 1
                self._send(held)
                self._receive(held)
        finally:
            self.leave()
        return {own.sequence.key: _report(own) for own in held}

    def leave(self) -> None:
        """None of its rows goes on; nobody wants what is under way."""
        self._held = []

    def step(self, rows: Rows[Row], most_ahead: int = AHEAD, *, further: bool = True) -> dict[int, RowResult]:
        """At least one id for each row, and whatever else has come. Launches no more than `most_ahead` steps ahead;
        without `further` nothing that no row waits for."""
        try:
            held = self._current(rows)
            if held is None:
                held = self._write(rows, self._settle(rows))
            else:
                self._extend(held)
                self._ahead = min(2 * self._ahead, most_ahead, self.most_ahead[self._bucket])
            if not further:
                self._ahead = 1
            self._send(held)
            self._receive(held)
            if further:
                self._send(held)
        except BaseException:
            self.leave()
            raise
        return {own.sequence.key: _report(own) for own in held}

    # Rows

    def _current(self, rows: Rows[Row]) -> list[PipelineRow] | None:
        """The device's rows in the plan's order where they are the same, else None."""
        if not self._bucket or bucket(len(rows)) < self._bucket:
            return None
        by_key = {own.sequence.key: own for own in self._held if not own.ended}
        held = []
        for row in rows:
            own = by_key.pop(row.key, None)
            if own is None or not self._continues(own, row):
                return None
            held.append(own)
        return None if by_key else held

    def _continues(self, own: PipelineRow, row: Row) -> bool:
        """Whether the device left the row where the plan takes it up."""
        sequence = self._sequences.of(row)
        return own.sequence is sequence and own.first + self._read == row.start and own.exchanges == sequence.exchanges

    def _settle(self, rows: Rows[Row]) -> dict[int, PipelineRow]:
        """Reads all that is under way for rows that go on; these rows by key."""
        by_key = {row.key: row for row in rows}
        kept = {}
        for own in self._held:
            row = by_key.get(own.sequence.key)
            if row is not None and not own.ended and self._continues(own, row):
                kept[row.key] = own
        while self._read < self._launched and any(not own.ended for own in kept.values()):
            if not self._read_step(self._held):
                self._device.wait()
        return kept

    def _write(self, rows: Rows[Row], kept: dict[int, PipelineRow]) -> list[PipelineRow]:
        """Writes these rows to the device, those of `kept` as far on as they are."""
        self._number += self._launched
        if self._number > _LAST_NUMBER:
            self._number = 0
        self._launched = self._read = 0
        self._ahead = FIRST_AHEAD
        held: list[PipelineRow] = []
        states: list[RowState] = []
        for row in rows:
            own = self._begin(row, kept.get(row.key))
            own.index = len(states)
            held.append(own)
            if not own.ended:
                states.append(RowState.of(own.sequence, own.first, own.last, own.unreported))
        self._bucket = bucket(len(states)) if states else 0
        if states:
            self._device.write(states, self._number)
        self._held = held
        return held

    def _begin(self, row: Row, old: PipelineRow | None) -> PipelineRow:
        sequence = self._sequences.of(row)
        last = sequence.last_position(self._max_context)
        own = PipelineRow(sequence, 0, row.start, last, len(sequence.pages), sequence.exchanges)
        if old is not None:
            own.unreported, own.ended = old.unreported, old.ended
            if not own.ended:
                # One may stand behind the last page: it is computed again, once there is another.
                del own.unreported[max(own.pages * PAGE_SIZE - 1 - row.start, 0) :]
            own.first += len(own.unreported)
        return own

    def _extend(self, held: Rows[PipelineRow]) -> None:
        """Passes on the pages that came since."""
        for own in held:
            known, pages = own.pages, own.sequence.pages
            if len(pages) > known:
                self._device.add_pages(own.index, known, pages[known:])
                own.pages = len(pages)

    # Steps

    def _send(self, held: Rows[PipelineRow]) -> None:
        """Launches as far ahead as is wanted, allowed and of use."""
        live = [own for own in held if not own.ended]
        if not live:
            return
        needed = max(own.last - own.first for own in live)
        bound = min(needed, *(own.room for own in live)) - self._launched
        under_way = self._launched - self._read
        wanted = self._ahead - under_way
        if wanted < min(self._sizes[0], bound) and under_way >= LOW:
            return
        wanted = min(wanted, bound)
        while wanted > 0:
            steps = next(size for size in self._sizes if size <= wanted)
            longest = max(min(own.first + self._launched + steps, own.last) for own in live)
            self._device.launch(steps, longest)
            self._launched += steps
            wanted -= steps

    def _receive(self, held: Rows[PipelineRow]) -> None:
        """Reads what has come; waits where a row would be left without."""
        while any(not own.ended for own in held):
            if self._read_step(held):
                continue
            if all(own.unreported or own.ended for own in held):
                return
            if self._read == self._launched:
                raise EngineFailed("a row has nothing under way")
            self._device.wait()

    def _read_step(self, held: Rows[PipelineRow]) -> bool:
        """Takes in the next step where it has come for all rows."""
        if self._read == self._launched:
            return False
        number = self._number + self._read + 1
        live = [own for own in held if not own.ended]
        entries = []
        for own in live:
            entry = self._device.poll(own.index, number)
            if entry is None:
                return False
            entries.append(entry)
        for own, entry in zip(live, entries, strict=True):
            flags = entry >> 24
            own.ended = flags != 0
            if not flags & NO_TOKEN:
                own.unreported.append(entry & 0xFFFFFF)
        self._read += 1
        return True


def _report(own: PipelineRow) -> RowResult:
    ids, own.unreported = tuple(own.unreported), []
    return RowResult(ids)
