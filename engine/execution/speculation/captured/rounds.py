"""Which rounds are launched ahead of their tokens, and what they brought. Torch-free.

A round is one verifying step of one sequence: its newest token and a draft are fed as rows side by side, and the device
says how many of them were right. How far a round moves the sequence is known only when it was read; the device knows it
at once, proposes the next draft by itself and goes on. So rounds are launched before those under way were read, as
steps of `graph_decode` are, and by the same rules:

- only within `step`, after the device was made to agree with the plan;
- only where the newest token has a page even if all under way prove right. The device cuts a draft at the last page, so
  rounds write into pages that the row held when they were launched, at positions not computed before;
- the row is written whole, and no number of an entry comes twice.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Protocol

from engine.errors import EngineFailed
from engine.execution.graph_decode.pipeline import NO_TOKEN, RowState
from engine.scheduling.plan import Row, RowResult
from engine.scheduling.sequence_state import SequenceState, SequenceTable
from engine.settings import PAGE_SIZE

GROUPS = (1, 2, 4, 8)  # rows of a round
AHEAD = 2  # rounds launched and not yet read: what comes of one decides how long the next but one may be
MOST_AHEAD = 8  # where rounds are so short that the host would not come to launch the next in time
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
    rounds = min(max(AHEAD, math.ceil(TURN / seconds)), MOST_AHEAD)
    tokens = min(rounds, MOST_AHEAD // 2) * GROUPS[-1]
    # Between a plan and the launches that follow it, as much may be read as was under way. Long rounds can wait for the
    # next plan, which comes before they end.
    return Ahead(rounds, tokens, (tokens if rounds == AHEAD else 2 * tokens) - 1)


class RoundDevice(Protocol):
    """The device: every call but `poll` and `wait` is queued behind those before it."""

    def write(self, row: RowState, most_drafts: int, number: int) -> None:
        """This row and no other. Entries are numbered from `number` + 1 on; 0: all numbers may come again."""

    def add_pages(self, first: int, pages: list[int]) -> None:
        """Pages [first, …) of the row, so that its next draft may be longer."""

    def launch(self, group: int, longest: int) -> None:
        """A round of so many rows, after which the row holds `longest` tokens at most."""

    def poll(self, number: int) -> int | None:
        """proposed << 28 | flags << 24 | token of an entry, None where it has not come."""

    def wait(self) -> None:
        """A moment. Raises where nothing is under way."""


@dataclass(frozen=True, slots=True)
class RoundTold:
    """What came of a round."""

    rows: int  # that it was made for
    proposed: int
    accepted: int


@dataclass(slots=True, eq=False)
class RoundRow:
    """The row that the device holds."""

    sequence: SequenceState
    stands: int  # position of the newest token that was read
    last: int  # position of its last token
    pages: int  # so many does the device know
    exchanges: int  # of the sequence's pages, when they were written
    most_drafts: int
    unreported: list[int] = field(default_factory=list)  # read from the device, in no result yet
    ended: bool = False  # the device moves it no more


class RoundPipeline:
    """The row on the device and the rounds under way."""

    def __init__(self, device: RoundDevice, sequences: SequenceTable, max_context: int) -> None:
        self._device = device
        self._sequences = sequences
        self._max_context = max_context
        self._own: RoundRow | None = None
        self._under_way: deque[int] = deque()  # rows of each round, oldest first
        self._number = 0  # of the last entry that was read
        self._open = 0  # tokens read of the oldest round under way
        self._told: list[RoundTold] = []
        self.read = Counter[int]()  # rounds, by rows: for measurements
        self.ahead = Ahead()

    def step(self, row: Row, group: int, most_drafts: int = GROUPS[-1] - 1) -> RowResult:
        """At least one id unless the row has failed, and whatever else has come. Launches rounds of `group` rows, with
        no draft longer than `most_drafts`."""
        try:
            own = self._current(row, most_drafts) or self._write(row, most_drafts)
            self._send(own, group)
            self._receive(own)
            self._send(own, group)
        except BaseException:
            self.leave()
            raise
        return _report(own)

    def take_told(self) -> list[RoundTold]:
        """What came of each round that was read since the last call."""
        told, self._told = self._told, []
        return told

    def leave(self) -> None:
        """The row does not go on here; nobody wants what is under way."""
        self._own = None

    def holds(self, row: Row) -> bool:
        """Whether rounds are under way that move this row on from where the plan takes it up."""
        return bool(self._under_way) and self.continues(row)

    def drain(self, row: Row) -> RowResult:
        """All that is under way for the row, which then leaves. Only what it `holds`."""
        own = self._own
        if own is None:
            raise EngineFailed("no row to bring to its end")
        while self._under_way and not own.ended:
            if not self._read_round(own):
                self._device.wait()
        self.leave()
        return _report(own)

    def continues(self, row: Row) -> bool:
        """Whether the device left the row where the plan takes it up."""
        own, sequence = self._own, self._sequences.of(row)
        return (
            own is not None
            and own.sequence is sequence
            and own.stands == row.start
            and own.exchanges == sequence.exchanges
        )

    def _current(self, row: Row, most_drafts: int) -> RoundRow | None:
        """The device's row where it is the plan's, with the pages that came since; else None."""
        own = self._own
        if own is None or not self.continues(row) or own.most_drafts != most_drafts:
            return None
        known, pages = own.pages, own.sequence.pages
        if len(pages) > known:
            self._device.add_pages(known, pages[known:])
            own.pages = len(pages)
        return own

    def _write(self, row: Row, most_drafts: int) -> RoundRow:
        """Writes the row to the device. What is under way, if anything, is for nobody, and may have told up to a
        group's entries a round."""
        self._number += sum(self._under_way)
        self._under_way.clear()
        self._open = 0
        if self._number > _LAST_NUMBER:
            self._number = 0
        sequence = self._sequences.of(row)
        last = min(sequence.prompt_length + sequence.stopping.max_tokens, self._max_context) - 1
        own = RoundRow(sequence, row.start, last, len(sequence.pages), sequence.exchanges, most_drafts)
        self._device.write(RowState.of(sequence, row.start, last), most_drafts, self._number)
        self._own = own
        return own

    def _send(self, own: RoundRow, group: int) -> None:
        """Launches as far ahead as is wanted, allowed and of use: each round brings a token, or as many as its rows."""
        most = 1 + own.most_drafts
        while not own.ended and len(self._under_way) < min(self.ahead.rounds, own.last - own.stands):
            tokens = sum(min(rows, most) for rows in self._under_way)
            furthest, brings = own.stands + tokens - self._open, min(group, most)
            if furthest >= own.pages * PAGE_SIZE or tokens + brings > self.ahead.tokens:
                return
            self._device.launch(group, min(furthest + brings, own.last))
            self._under_way.append(group)

    def _receive(self, own: RoundRow) -> None:
        """Reads what has come; waits where the row would be left without."""
        while not own.ended:
            if self._read_round(own):
                continue
            if own.unreported:
                return
            if not self._under_way:
                raise EngineFailed("a row has nothing under way")
            self._device.wait()

    def _read_round(self, own: RoundRow) -> bool:
        """Takes in what has come of the oldest round; whether that was its end."""
        while self._under_way:
            entry = self._device.poll(self._number + 1)
            if entry is None:
                return False
            self._number += 1
            flags = entry >> 24 & _FLAGS
            if flags == PARKED:
                raise EngineFailed("a round was launched without a page for its token")
            if not flags & NO_TOKEN:
                own.unreported.append(entry & _TOKEN)
                own.stands += 1
                self._open += 1
            if flags == MORE:
                continue
            rows = self._under_way.popleft()
            own.ended = flags != 0
            accepted = self._open - (0 if flags & NO_TOKEN else 1)
            self.read[rows] += 1
            self._told.append(RoundTold(rows, entry >> 28 & _FLAGS, accepted))
            self._open = 0
            return True
        return False


def _report(own: RoundRow) -> RowResult:
    ids, own.unreported = tuple(own.unreported), []
    return RowResult(ids)
