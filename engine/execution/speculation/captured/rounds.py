"""Which rounds are launched ahead of their tokens, and what they brought. Torch-free.

A round is one verifying step of a sequence, or of several: the newest token of each and a draft are fed as rows side
by side, and the device says how many of them were right. How far a round moves a sequence is known only when it was
read; the device knows it at once, proposes the next draft by itself and goes on. So rounds are launched before those
under way were read, as steps of `graph_decode` are, and by the same rules:

- only within `step`, after the device was made to agree with the plan;
- only where every newest token has a page even if all under way prove right. The device cuts a draft at the last page,
  so rounds write into pages that a row held when they were launched, at positions not computed before;
- rows are written whole and together, and no number of an entry comes twice.

Several rows stand unequally far, and a row that has ended is moved no more while the others go on. A round is read once
it was told for all of them. Where others are to join or one leaves too early, all under way is read first (`drain`).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.errors import EngineFailed
from engine.execution.graph_decode.pipeline import NO_TOKEN, RowState
from engine.scheduling.plan import Row
from engine.scheduling.sequence_state import SequenceState, SequenceTable
from engine.settings import PAGE_SIZE

GROUPS = (1, 2, 4, 8)  # rows of a round
AHEAD = 2  # rounds launched and not yet read: what comes of one decides how long the next but one may be
MOST_AHEAD = 8  # where rounds are so short that the host would not come to launch the next in time
LEAD = 500e-6  # seconds that rounds under way should last: a host on a busy machine is late at times
TURN = 250e-6  # seconds until the host comes by again, a guess
MORE = 8  # flag of an entry: the round tells another
PARKED = MORE | NO_TOKEN  # nothing was fed: there was no page
_FLAGS, _TOKEN = 0xF, 0xFFFFFF
_LAST_NUMBER = 1 << 30  # numbers begin anew above it


@dataclass(frozen=True, slots=True)
class Ahead:
    """How far rounds are launched ahead."""

    rounds: int = AHEAD
    tokens: int = AHEAD * GROUPS[-1]  # that they may bring
    lookahead: int = AHEAD * GROUPS[-1] - 1  # tokens behind the newest that a plan sees to pages for


def ahead_of(seconds: float) -> Ahead:
    """For rounds that take so long."""
    rounds = min(max(AHEAD, math.ceil(LEAD / seconds)), MOST_AHEAD)
    tokens = rounds * GROUPS[-1]
    # Between a plan and the launches that follow it, as much may be read as was under way. Long rounds can wait for the
    # next plan, which comes before they end.
    return Ahead(rounds, tokens, (tokens if rounds == AHEAD else 2 * tokens) - 1)


class RoundDevice(Protocol):
    """The device: every call but `poll` and `wait` is queued behind those before it."""

    def write(self, rows: Rows[RowState], most_drafts: Rows[int], number: int) -> None:
        """These rows and no others. The entries of each are numbered from `number` + 1 on; 0: all numbers may come
        again."""

    def left(self, sequence: SequenceState, stands: int) -> None:
        """It goes on elsewhere with its newest token at `stands`, all of its rounds read."""

    def add_pages(self, index: int, first: int, pages: list[int], *, cut: bool) -> None:
        """Pages [first, …) of a row. `cut`: the draft that is laid out may have ended where its pages did."""

    def launch(self, group: int, longest: int) -> None:
        """A round of so many rows a sequence, after which none holds more than `longest` tokens."""

    def poll(self, index: int, number: int) -> int | None:
        """proposed << 28 | flags << 24 | token of a row's entry, None where it has not come."""

    def wait(self) -> None:
        """A moment. Raises where nothing is under way."""


@dataclass(frozen=True, slots=True)
class RoundTold:
    """What came of a round for a sequence."""

    rows: int  # that it was made for
    proposed: int
    accepted: int


@dataclass(slots=True, eq=False)
class RoundRow:
    """A row that the device holds."""

    sequence: SequenceState
    index: int  # among the device's rows
    stands: int  # position of the newest token that was read
    last: int  # position of its last token
    pages: int  # so many does the device know
    exchanges: int  # of the sequence's pages, when they were written
    most_drafts: int
    number: int  # of its last entry that was read
    unreported: list[int] = field(default_factory=list)  # read from the device, in no result yet
    told: list[RoundTold] = field(default_factory=list)  # of rounds that were read, in no result yet
    ended: bool = False  # the device moves it no more

    def take(self, entries: Rows[int], rows: int) -> None:
        """What a round of so many rows has told."""
        flags = entries[-1] >> 24 & _FLAGS
        ids = [entry & _TOKEN for entry in (entries[:-1] if flags & NO_TOKEN else entries)]
        self.unreported += ids
        self.stands += len(ids)
        self.number += len(entries)
        self.ended = flags != 0
        self.told.append(RoundTold(rows, entries[-1] >> 28 & _FLAGS, len(entries) - 1))


class Brought(NamedTuple):
    """What a step brought a row."""

    token_ids: tuple[int, ...]
    rounds: tuple[RoundTold, ...]


class RoundPipeline:
    """The rows on the device and the rounds under way."""

    def __init__(self, device: RoundDevice, sequences: SequenceTable, max_context: int) -> None:
        self._device = device
        self._sequences = sequences
        self._max_context = max_context
        self._held: list[RoundRow] = []
        self._under_way: deque[int] = deque()  # rows of each round for a sequence, oldest first
        self._number = 0  # of the last entry before the rows were written
        self._most = 0  # entries that rounds launched since then may tell of a row
        self.read = Counter[int]()  # rounds, by rows for a sequence: for measurements
        self.ahead = Ahead()

    def step(self, rows: Rows[Row], group: int, most_drafts: Rows[int]) -> dict[int, Brought]:
        """At least one id for each row that has not failed, and whatever else has come. Launches rounds of `group` rows
        a sequence, with no draft longer than `most_drafts` of each."""
        try:
            if not self._current(rows, most_drafts):
                self._write(rows, most_drafts)
            self._send(group)
            self._receive()
            self._send(group)
        except BaseException:
            self.leave()
            raise
        return self._report()

    def leave(self) -> None:
        """No row goes on here; nobody wants what is under way."""
        self._held = []

    def holds(self, rows: Rows[Row]) -> tuple[Row, ...]:
        """Those that rounds under way move on from where the plan takes them up."""
        return tuple(row for row in rows if self._of(row) is not None) if self._under_way else ()

    def drain(self, rows: Rows[Row]) -> dict[int, Brought]:
        """All that is under way for these rows, which then leave, as all others do. Only what it `holds`."""
        self._held = [own for own in map(self._of, rows) if own is not None]
        while self._under_way and any(not own.ended for own in self._held):
            if not self._read_round():
                self._device.wait()
        found = self._report()
        for own in self._held:
            if not own.ended:
                self._device.left(own.sequence, own.stands)
        self.leave()
        return found

    def continues(self, rows: Rows[Row]) -> bool:
        """Whether the device left these rows, and no others, where the plan takes them up."""
        live = sum(not own.ended for own in self._held)
        return live == len(rows) and all(self._of(row) is not None for row in rows)

    def _of(self, row: Row) -> RoundRow | None:
        """The device's row where it is the plan's."""
        sequence = self._sequences.of(row)
        for own in self._held:
            if own.sequence is sequence and not own.ended:
                return own if own.stands == row.start and own.exchanges == sequence.exchanges else None
        return None

    def _current(self, rows: Rows[Row], most_drafts: Rows[int]) -> bool:
        """Whether the device's rows are the plan's; passes on the pages that came since."""
        if not self.continues(rows):
            return False
        held = [own for own in map(self._of, rows) if own is not None]
        if any(own.most_drafts != most for own, most in zip(held, most_drafts, strict=True)):
            return False
        for own in held:
            known, pages = own.pages, own.sequence.pages
            if len(pages) > known:
                cut = self._furthest(own) + own.most_drafts >= known * PAGE_SIZE
                self._device.add_pages(own.index, known, pages[known:], cut=cut)
                own.pages = len(pages)
        self._held = held
        return True

    def _write(self, rows: Rows[Row], most_drafts: Rows[int]) -> None:
        """Writes the rows to the device. What is under way, if anything, is for nobody."""
        self._number += self._most
        if self._number > _LAST_NUMBER:
            self._number = 0
        self._under_way.clear()
        self._most = 0
        held, states = [], []
        for index, (row, most) in enumerate(zip(rows, most_drafts, strict=True)):
            sequence = self._sequences.of(row)
            last = sequence.last_position(self._max_context)
            pages = len(sequence.pages)
            held.append(RoundRow(sequence, index, row.start, last, pages, sequence.exchanges, most, self._number))
            states.append(RowState.of(sequence, row.start, last))
        self._device.write(states, most_drafts, self._number)
        self._held = held

    def _send(self, group: int) -> None:
        """Launches as far ahead as is wanted, allowed and of use: each round brings a token, or as many as its rows."""
        live = [own for own in self._held if not own.ended]
        if not live:
            return
        needed = min(self.ahead.rounds, max(own.last - own.stands for own in live))
        while len(self._under_way) < needed:
            longest = 0
            for own in live:
                furthest, brings = self._furthest(own), min(group, 1 + own.most_drafts)
                too_many = furthest - own.stands + brings > self.ahead.tokens
                if too_many or min(furthest, own.last - 1) >= own.pages * PAGE_SIZE:
                    return
                longest = max(longest, min(furthest + brings, own.last))
            self._device.launch(group, longest)
            self._under_way.append(group)
            self._most += group

    def _furthest(self, own: RoundRow) -> int:
        """Where its newest token stands if all under way prove right."""
        most = 1 + own.most_drafts
        return own.stands + sum(min(rows, most) for rows in self._under_way)

    def _receive(self) -> None:
        """Reads what has come; waits where a row would be left without."""
        while any(not own.ended for own in self._held):
            if self._read_round():
                continue
            if all(own.unreported or own.ended for own in self._held):
                return
            if not self._under_way:
                raise EngineFailed("a row has nothing under way")
            self._device.wait()

    def _read_round(self) -> bool:
        """Takes in the oldest round where it was told for all rows, so that it brings each of them something."""
        if not self._under_way:
            return False
        live, told = [own for own in self._held if not own.ended], []
        for own in live:
            entries = self._entries(own)
            if not entries:
                return False
            told.append(entries)
        rows = self._under_way.popleft()
        self.read[rows] += 1
        for own, entries in zip(live, told, strict=True):
            own.take(entries, rows)
        return True

    def _entries(self, own: RoundRow) -> list[int]:
        """Of the oldest round for a row; none as long as one is missing."""
        found: list[int] = []
        while (entry := self._device.poll(own.index, own.number + 1 + len(found))) is not None:
            found.append(entry)
            flags = entry >> 24 & _FLAGS
            if flags == PARKED:
                raise EngineFailed("a round was launched without a page for its token")
            if flags != MORE:
                return found
        return []

    def _report(self) -> dict[int, Brought]:
        found = {own.sequence.key: Brought(tuple(own.unreported), tuple(own.told)) for own in self._held}
        for own in self._held:
            own.unreported, own.told = [], []
        return found
