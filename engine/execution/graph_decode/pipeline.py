"""Which rows the device holds, how far it was sent ahead of what it has told, and when its state must be written anew.

Steps are launched before the tokens of earlier ones were read, as long as the plans go on as expected. Torch-free.

- The device holds seats, one a row. A step moves every live seat on by one token, so all stand equally far.
- Steps are launched only within `step`, after the seats were made to agree with its rows, and never beyond the pages of
  a row. What was launched for rows that have since gone comes before anything later on the same stream: a page that
  went to another owner is written by the old one's steps first, and by the new one's after that.
- Seats are written whole, never in part, after all that was launched for rows that stay has been read.
- An entry of the device has a number, and none comes twice, so that what an earlier seating left is never taken.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Protocol

from engine.errors import EngineFailed
from engine.sampling.noise import seed_key
from engine.scheduling.plan import Row, RowResult
from engine.scheduling.sequence import Sequence
from engine.settings import PAGE_SIZE

BUCKETS = (1, 2, 4, 8)
SIZES = (4, 1)  # steps of a launch, largest first
AHEAD = 8  # steps launched and not yet read, at most
FIRST_AHEAD = 2  # right after rows came or went; doubles with every call
LOW = 2  # steps under way, below which small launches are made rather than none
MOST_STOPS = 8
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
    sequence: Sequence
    fresh: tuple[int, ...]  # tokens that the sequence has not been given yet


class StepDevice(Protocol):
    """The device: every call but `poll` and `wait` is queued behind those before it."""

    def place(self, seats: Rows[RowState], number: int) -> None:
        """These rows and no others. Entries are numbered from `number` + 1 on; 0: all numbers may come again."""

    def add_pages(self, seat: int, first: int, pages: Rows[int]) -> None:
        """Pages [first, …) of a row."""

    def launch(self, steps: int, longest: int) -> None:
        """Steps of all rows; none of them will hold more than `longest` tokens."""

    def poll(self, seat: int, number: int) -> int | None:
        """flags << 24 | token of the entry, None where it has not come."""

    def wait(self) -> None:
        """A moment. Raises where nothing is under way."""


@dataclass(slots=True, eq=False)
class PipelineRow:
    """A row under way."""

    sequence: Sequence
    slot: int
    seat: int
    first: int  # position of the token that it was seated with
    last: int  # position of its last token
    pages: list[int]  # as the device knows them
    fresh: list[int] = field(default_factory=list)  # read from the device, not yet given
    ended: bool = False  # the device moves it no more

    @property
    def room(self) -> int:
        """Steps that its pages allow, and one more than it needs where they suffice to its end."""
        held = len(self.pages) * PAGE_SIZE
        return (held if held < self.last else 1 << 30) - self.first


def bucket(rows: int) -> int:
    """Seats that are kept for so many rows."""
    return next(size for size in BUCKETS if size >= rows)


def can_sample(row: Row) -> bool:
    """Whether the kernels choose this row's tokens: all but those with logprobs or many stop tokens."""
    request = row.sequence.request
    return request.logprobs is None and len(request.stopping.stop_token_ids) <= MOST_STOPS


class DecodePipeline:
    """The rows on the device and the steps under way."""

    def __init__(self, card: StepDevice, max_context: int, sizes: tuple[int, ...] = SIZES) -> None:
        self._card = card
        self._max_context = max_context
        self._sizes = sizes
        self._lanes: list[PipelineRow] = []
        self._seats = 0  # seats that the device moves, taken or not
        self._number = 0  # of the last entry before this seating
        self._launched = 0  # steps of this seating
        self._told = 0  # of them, read
        self._ahead = FIRST_AHEAD

    def forget(self, slots: Rows[int]) -> None:
        """These slots have new owners, or the old one begins anew."""
        for lane in self._lanes:
            if lane.slot in slots:
                lane.slot = -1

    def leave(self) -> None:
        """Nobody's rows go on here; what is under way is for nobody."""
        self._lanes = []

    def step(self, rows: Rows[Row], most_ahead: int = AHEAD) -> list[RowResult]:
        """At least one id for each row, and whatever else has come. Launches `most_ahead` steps ahead, no more."""
        try:
            lanes = self._current(rows)
            if lanes is None:
                lanes = self._seat(rows, self._settle(rows))
            else:
                self._extend(lanes)
                self._ahead = min(2 * self._ahead, most_ahead)
            self._send(lanes)
            self._receive(lanes)
            self._send(lanes)
        except BaseException:
            self.leave()
            raise
        return [_given(lane) for lane in lanes]

    # Seats

    def _current(self, rows: Rows[Row]) -> list[PipelineRow] | None:
        """The lanes of these rows where the device holds just them, else None."""
        if not self._seats or bucket(len(rows)) < self._seats:
            return None
        by_sequence = {id(lane.sequence): lane for lane in self._lanes if not lane.ended}
        lanes = []
        for row in rows:
            lane = by_sequence.pop(id(row.sequence), None)
            if lane is None or not self._continues(lane, row):
                return None
            lanes.append(lane)
        return None if by_sequence else lanes

    def _continues(self, lane: PipelineRow, row: Row) -> bool:
        """Whether the device left the row where the plan takes it up."""
        sequence = row.sequence
        return (
            lane.slot == sequence.slot
            and lane.first + self._told == row.start
            and sequence.pages[: len(lane.pages)] == lane.pages
        )

    def _settle(self, rows: Rows[Row]) -> dict[int, PipelineRow]:
        """Reads all that is under way for rows that go on; their lanes by the identity of their sequences."""
        by_sequence = {id(row.sequence): row for row in rows}
        kept = {}
        for lane in self._lanes:
            row = by_sequence.get(id(lane.sequence))
            if row is not None and not lane.ended and self._continues(lane, row):
                kept[id(lane.sequence)] = lane
        while self._told < self._launched and any(not lane.ended for lane in kept.values()):
            if not self._read(self._lanes):
                self._card.wait()
        return kept

    def _seat(self, rows: Rows[Row], kept: dict[int, PipelineRow]) -> list[PipelineRow]:
        """Writes the seats of these rows, those of `kept` as far on as they are."""
        self._number += self._launched
        if self._number > _LAST_NUMBER:
            self._number = 0
        self._launched = self._told = 0
        self._ahead = FIRST_AHEAD
        lanes: list[PipelineRow] = []
        seats: list[RowState] = []
        for row in rows:
            lane = self._lane(row, kept.get(id(row.sequence)))
            lane.seat = len(seats)
            lanes.append(lane)
            if not lane.ended:
                seats.append(self._told_of(lane))
        self._seats = bucket(len(seats)) if seats else 0
        if seats:
            self._card.place(seats, self._number)
        self._lanes = lanes
        return lanes

    def _lane(self, row: Row, old: PipelineRow | None) -> PipelineRow:
        sequence = row.sequence
        last = min(sequence.prompt_length + sequence.request.stopping.max_tokens, self._max_context) - 1
        lane = PipelineRow(sequence, sequence.slot, 0, row.start, last, list(sequence.pages))
        if old is not None:
            lane.fresh, lane.ended = old.fresh, old.ended
            if not lane.ended:
                # One may stand behind the last page: it is computed again, once there is another.
                del lane.fresh[max(len(lane.pages) * PAGE_SIZE - 1 - row.start, 0) :]
            lane.first += len(lane.fresh)
        return lane

    def _told_of(self, lane: PipelineRow) -> RowState:
        sequence, sampling = lane.sequence, lane.sequence.request.sampling
        return RowState(
            token=lane.fresh[-1] if lane.fresh else sequence.token_ids[lane.first],
            position=lane.first,
            last_position=lane.last,
            stops=sequence.request.stopping.stop_token_ids,
            temperature=sampling.temperature,
            noise_key=seed_key(sampling.seed),
            pages=tuple(lane.pages),
            sequence=sequence,
            fresh=tuple(lane.fresh),
        )

    def _extend(self, lanes: Rows[PipelineRow]) -> None:
        """Tells of pages that came since."""
        for lane in lanes:
            known, pages = len(lane.pages), lane.sequence.pages
            if len(pages) > known:
                self._card.add_pages(lane.seat, known, pages[known:])
                lane.pages += pages[known:]

    # Steps

    def _send(self, lanes: Rows[PipelineRow]) -> None:
        """Launches as far ahead as is wanted, allowed and of use."""
        live = [lane for lane in lanes if not lane.ended]
        if not live:
            return
        needed = max(lane.last - lane.first for lane in live)
        bound = min(needed, *(lane.room for lane in live)) - self._launched
        under_way = self._launched - self._told
        wanted = self._ahead - under_way
        if wanted < min(self._sizes[0], bound) and under_way >= LOW:
            return
        wanted = min(wanted, bound)
        while wanted > 0:
            steps = next(size for size in self._sizes if size <= wanted)
            longest = max(min(lane.first + self._launched + steps, lane.last) for lane in live)
            self._card.launch(steps, longest)
            self._launched += steps
            wanted -= steps

    def _receive(self, lanes: Rows[PipelineRow]) -> None:
        """Reads what has come; waits where a row would be left without."""
        while any(not lane.ended for lane in lanes):
            if self._read(lanes):
                continue
            if all(lane.fresh or lane.ended for lane in lanes):
                return
            if self._told == self._launched:
                raise EngineFailed("a row has nothing under way")
            self._card.wait()

    def _read(self, lanes: Rows[PipelineRow]) -> bool:
        """Takes in the next step where it has come for all rows."""
        if self._told == self._launched:
            return False
        number = self._number + self._told + 1
        live = [lane for lane in lanes if not lane.ended]
        entries = []
        for lane in live:
            entry = self._card.poll(lane.seat, number)
            if entry is None:
                return False
            entries.append(entry)
        for lane, entry in zip(live, entries, strict=True):
            flags = entry >> 24
            lane.ended = flags != 0
            if not flags & NO_TOKEN:
                lane.fresh.append(entry & 0xFFFFFF)
        self._told += 1
        return True


def _given(lane: PipelineRow) -> RowResult:
    ids, lane.fresh = tuple(lane.fresh), []
    return RowResult(ids)
