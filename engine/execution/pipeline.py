"""Launches steps ahead of their tokens, and keeps the rows that a device holds in agreement with the plans. Torch-free.

`Pipeline` rewrites all of up to eight rows when some change: in plain steps and verifying launches (a plain step is one
of a row without a draft). `masked_pipeline` adds masked steps. For many rows, `batch_pipeline` sends only what changed.

All keep these rules:
- Only `step` launches, after the device's rows agree with the plan's, and never beyond the pages that a row then holds.
  Steps of rows that have left precede all later work on the stream, so a page's old owner writes it before its new one.
- The device knows at once how far a launch moves a row, so further launches need not wait. The host knows it from
  entries, and reads a launch once all rows that it moves have theirs.
- Numbers of ring entries do not repeat, so that what earlier rows left is never taken.
- A row is written anew if another executor moved it on, its sequence is a new one, or its pages were exchanged.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import msgspec

from engine.errors import EngineFailed
from engine.execution.router import AHEAD, ALL_OPTIONS, StepOptions
from engine.sampling.noise import seed_key
from engine.scheduling.plan import Row, RowResult, Share
from engine.scheduling.sequence_state import SequenceState, SequenceTable
from engine.settings import PAGE_SIZE

BUCKETS: Final = (1, 2, 4, 8)  # rows that a captured step of few rows moves
SIZES: Final = (4, 1)  # steps of a launch, largest first
GROUPS: Final = (1, 2, 4, 8)  # rows of a sequence in a verifying launch: its newest token and a draft
NO_TOKEN, MORE = 4, 8  # flags of an entry. Any flag but MORE ends the row; MORE: the launch has another entry for it
PARKED = MORE | NO_TOKEN  # nothing was fed: there was no page
FLAGS, TOKEN = 0xF, 0xFFFFFF
_LAST_NUMBER = 1 << 30  # numbers begin anew above it
FAR = 1 << 62
Mask = bytes | bytearray  # a bit for each token, from the lowest bit of the first byte on

_LEAD = 4e-3  # seconds that plain steps in flight should last: the host is late at times, and prompts wait behind them
_FIRST_AHEAD = 2  # right after rows came or went; doubles with every step
LOW = 2  # steps in flight, below which small launches are made rather than none
_VERIFY_LEAD = 500e-6  # seconds that verifying launches in flight should last
VERIFY_AHEAD = 2  # verifying launches: what comes of one decides how long the next but one may be
MOST_VERIFY_AHEAD = 8  # where they are so short that the host would not come to launch the next in time


@dataclass(frozen=True, slots=True)
class RowState:
    token: int  # to be fed
    position: int  # of that token
    last_position: int  # a token placed there is the row's last
    stops: tuple[int, ...]
    temperature: float
    noise_key: int
    pages: tuple[int, ...]
    sequence: SequenceState
    unreported: tuple[int, ...]  # tokens that no result has brought yet
    most_drafts: int = 0

    @classmethod
    def of(
        cls, sequence: SequenceState, position: int, last: int, unreported: Rows[int] = (), most_drafts: int = 0
    ) -> RowState:
        """The token at `position` is to be fed: the last unreported one, if any."""
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
            most_drafts=most_drafts,
        )


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Replaces all rows. Their entries are numbered from `number` + 1 on; 0: earlier numbers may recur."""

    rows: tuple[RowState, ...]
    number: int


@dataclass(frozen=True, slots=True)
class MorePages:
    """Adds pages to a row's table, from entry `first` on."""

    index: int
    first: int
    pages: tuple[int, ...]
    cut: bool = False  # the draft that is laid out may have ended where the row's pages did


class Half(NamedTuple):
    """Half of a masked step: its layers, or, given masks by row index, its choice of tokens."""

    masks: Mapping[int, Mask] | None = None


class StepLaunch(msgspec.Struct, frozen=True, array_like=True):
    longest: int = 0  # tokens: no row comes to hold more of them
    steps: int = 1
    group: int = 1  # rows of a sequence: its newest token, and a draft of up to one token less
    rows: int = 0  # of many: the first so many row states
    half: Half | None = None
    options: StepOptions = ALL_OPTIONS


class RowDevice(Protocol):
    """Runs steps of few rows. All calls but `poll` and `wait` are enqueued in order."""

    def update(self, update: Rewrite | MorePages) -> None: ...

    def launch(self, launch: StepLaunch) -> None: ...

    def poll(self, index: int, number: int) -> int | None:
        """Returns proposed << 28 | flags << 24 | token of a row's entry, None while it is missing."""

    def wait(self) -> None:
        """Waits for a moment. Raises where nothing is in flight."""


class Lookahead(NamedTuple):
    launches: int
    first: int  # launches right after rows were rewritten; the number doubles with every step
    tokens: int = FAR  # that all launches in flight may bring a row
    pages: int = 0  # tokens behind a row's newest one that a plan has pages for


def plain_lookahead(seconds: float) -> Lookahead:
    return Lookahead(min(max(LOW, math.ceil(_LEAD / seconds)), AHEAD), _FIRST_AHEAD)


def verify_lookahead(seconds: float) -> Lookahead:
    launches = min(max(VERIFY_AHEAD, math.ceil(_VERIFY_LEAD / seconds)), MOST_VERIFY_AHEAD)
    tokens = launches * GROUPS[-1]
    # Between a plan and the launches that follow it, as much may be read as was in flight. Long launches can wait for
    # the next plan, which comes before they end.
    return Lookahead(launches, launches, tokens, (tokens if launches == VERIFY_AHEAD else 2 * tokens) - 1)


def bucket(rows: int, buckets: Rows[int] = BUCKETS) -> int:
    return next(size for size in buckets if size >= rows)


class VerifiedDraft(NamedTuple):
    rows: int  # of the sequence in the launch
    proposed: int
    accepted: int


@dataclass(slots=True, eq=False)
class HeldRow:
    sequence: SequenceState
    index: int  # among the device's rows
    stands: int  # position of the newest token that was read: the first unread step feeds it
    last: int  # position of its last token
    pages: int  # that the device knows
    page_table_version: int  # of the sequence's pages, when they were written
    most_drafts: int = 0
    number: int = 0  # of the last entry that was read
    ahead: int = 0  # tokens that all launches in flight bring, if all drafts are right
    unreported: list[int] = field(default_factory=list)  # read, and in no result yet
    proposed: int = 0  # draft tokens, in no result yet
    accepted: int = 0
    ended: bool = False  # the device moves it no more

    def launches_of(self, group: int, tokens: int) -> int:
        """Returns how many more launches the row's pages allow, with at most `tokens` in flight."""
        each = min(group, 1 + self.most_drafts)
        allowed, pages = (tokens - self.ahead) // each, self.pages * PAGE_SIZE
        if pages < self.last:
            return min(allowed, (pages - self.stands - self.ahead + each - 1) // each)
        return allowed

    def report(self) -> RowResult:
        ids, self.unreported = tuple(self.unreported), []
        if not self.proposed:
            return RowResult(ids)
        found = RowResult(ids, (), self.proposed, self.accepted)
        self.proposed = self.accepted = 0
        return found


class Pipeline:
    def __init__(
        self,
        device: RowDevice,
        sequences: SequenceTable,
        max_context: int,
        *,
        buckets: Rows[int] = BUCKETS,
        sizes: Rows[int] = SIZES,
        settles: bool = True,
    ) -> None:
        """`sizes`: steps of a launch, largest first. `settles`: before a rewrite, tokens in flight for rows that stay
        are read, not computed again."""
        self._device = device
        self._sequences = sequences
        self._max_context = max_context
        self._buckets = buckets
        self._sizes = sizes
        self._settles = settles
        self.lookahead: Mapping[int, Lookahead] = dict.fromkeys(buckets, Lookahead(AHEAD, _FIRST_AHEAD))  # by bucket
        self.read = Counter[int]()  # launches, by their group: for measurements
        self.verified: list[tuple[SequenceState, VerifiedDraft]] = []  # what came of drafts; for the caller to take
        self._held: dict[int, HeldRow] = {}  # by key
        self._bucket = 0  # rows that the device moves, in use or not
        self._in_flight: deque[int] = deque()  # the group of each step, oldest first
        self._number = 0  # of the last entry before the rows were written
        self._entries = 0  # that a row may have since then, at most
        self._singles = 0  # steps of one row a sequence that were read, and that the rows do not count yet
        self._ahead = 0

    def step(
        self,
        rows: Rows[Row],
        options: StepOptions = ALL_OPTIONS,
        *,
        group: int = 1,
        most_drafts: Rows[int] = (),
        most_ahead: int = AHEAD,
    ) -> dict[int, RowResult]:
        """Returns at least one id for each row that has not failed. `most_ahead` 1 launches only what rows wait for."""
        further = most_ahead > 1
        try:
            held = self._current(rows, most_drafts)
            if held is None:
                held = self._rewrite(rows, self._settle(rows) if self._settles else {}, most_drafts)
            else:
                self._extend(held)
                self._ahead = min(2 * self._ahead, most_ahead, self.lookahead[self._bucket].launches)
            if not further:
                self._ahead = 1
            self._send(held, group, options)
            self._receive(held)
            if further:
                self._send(held, group, options)
        except BaseException:
            self.leave()
            raise
        return {own.sequence.key: own.report() for own in held}

    def drain(self, rows: Rows[Row], options: StepOptions = ALL_OPTIONS, group: int = 1) -> dict[int, RowResult]:
        """Returns all that is in flight for these rows, at least one id for each. All rows then leave."""
        try:
            kept = self._settle(rows)
            held = list(kept.values())
            if len(kept) < len(rows) or not all(own.unreported or own.ended for own in held):
                held = self._rewrite(rows, kept, ())
                self._ahead = 1
                self._send(held, group, options)
                self._receive(held)
        finally:
            self.leave()
        return {own.sequence.key: own.report() for own in held}

    def leave(self) -> None:
        """Forgets all rows; what is in flight for them is never read."""
        self._held = {}

    def in_flight(self, rows: Rows[Row]) -> list[Row]:
        """Returns the rows that launches in flight move on from where the plan takes them up."""
        if not (self._held and self._in_flight):
            return []
        return [row for row in rows if self._of(row) is not None]

    def continues(self, rows: Rows[Row]) -> bool:
        """Returns whether the device holds exactly these rows, where the plan takes them up."""
        live = sum(not own.ended for own in self._held.values())
        return live == len(rows) and all(self._of(row) is not None for row in rows)

    # Rows

    def _of(self, row: Row) -> HeldRow | None:
        """Returns the device's row if the plan takes it up where the device left it."""
        own = self._held.get(row.key)
        if own is None or own.ended or own.stands != row.start:
            return None
        sequence = self._sequences.of(row)
        return own if own.sequence is sequence and own.page_table_version == sequence.page_table_version else None

    def _current(self, rows: Rows[Row], most_drafts: Rows[int]) -> list[HeldRow] | None:
        """Returns None where the rows must be rewritten."""
        if not self._bucket or bucket(len(rows), self._buckets) < self._bucket:
            return None
        held = []
        for row in rows:
            own = self._of(row)
            if own is None:
                return None
            held.append(own)
        for own, most in zip(held, most_drafts, strict=False):
            if own.most_drafts != most:
                return None
        live = len(self._held)
        if live > len(held):
            live = sum(not own.ended for own in self._held.values())
        return held if live == len(held) else None

    def _settle(self, rows: Rows[Row]) -> dict[int, HeldRow]:
        kept = {row.key: own for row in rows if (own := self._of(row)) is not None}
        while self._in_flight and any(not own.ended for own in kept.values()):
            if not self._read_launch([own for own in self._held.values() if not own.ended]):
                self._device.wait()
        self._count_singles()
        return kept

    def _rewrite(self, rows: Rows[Row], kept: Mapping[int, HeldRow], most_drafts: Rows[int]) -> list[HeldRow]:
        """Rows of `kept` go on from where they stand."""
        self._number += self._entries
        if self._number > _LAST_NUMBER:
            self._number = 0
        self._in_flight.clear()
        self._entries = 0
        held: list[HeldRow] = []
        states: list[RowState] = []
        for at, row in enumerate(rows):
            own = self._begin(row, kept.get(row.key), most_drafts[at] if most_drafts else 0)
            own.index = len(states)
            held.append(own)
            if not own.ended:
                states.append(RowState.of(own.sequence, own.stands, own.last, own.unreported, own.most_drafts))
        self._bucket = bucket(len(states), self._buckets) if states else 0
        if states:
            self._device.update(Rewrite(tuple(states), self._number))
            self._ahead = self.lookahead[self._bucket].first
        self._held = {own.sequence.key: own for own in held}
        if len(self._held) < len(held):
            raise EngineFailed("a sequence has two rows")
        return held

    def _begin(self, row: Row, old: HeldRow | None, most_drafts: int) -> HeldRow:
        sequence = self._sequences.of(row)
        last = sequence.last_position(self._max_context)
        own = HeldRow(
            sequence, 0, row.start, last, len(sequence.pages), sequence.page_table_version, most_drafts, self._number
        )
        if old is not None:
            own.unreported, own.ended = old.unreported, old.ended
            own.proposed, own.accepted = old.proposed, old.accepted
            if not own.ended:
                # One may stand behind the last page: it is computed again, once there is another.
                del own.unreported[max(own.pages * PAGE_SIZE - 1 - row.start, 0) :]
            own.stands += len(own.unreported)
        return own

    def _extend(self, held: Rows[HeldRow]) -> None:
        for own in held:
            known, pages = own.pages, own.sequence.pages
            if len(pages) > known:
                cut = own.stands + own.ahead + own.most_drafts >= known * PAGE_SIZE
                self._device.update(MorePages(own.index, known, tuple(pages[known:]), cut))
                own.pages = len(pages)

    # Launches

    def _send(self, held: Rows[HeldRow], group: int, options: StepOptions) -> None:
        """Launches as far ahead as is wanted, allowed and of use."""
        in_flight, needed, allowed = len(self._in_flight), 0, FAR
        wanted = self._ahead - in_flight
        live = [own for own in held if not own.ended] if wanted > 0 else []
        if not live:
            return
        tokens = self.lookahead[self._bucket].tokens
        for own in live:  # compared by hand, since this is done twice a step
            left, pages = own.last - own.stands, own.pages * PAGE_SIZE
            if left > needed:
                needed = left
            if group > 1 or tokens < FAR:
                allowed = min(allowed, own.launches_of(group, tokens))
            elif pages < own.last and pages - own.stands - own.ahead < allowed:
                allowed = pages - own.stands - own.ahead
        bound = min(needed - in_flight, allowed)
        if wanted < min(self._sizes[0], bound) and in_flight >= LOW:
            return
        self._launch(live, min(wanted, bound), group, options)

    def _launch(self, live: Rows[HeldRow], wanted: int, group: int, options: StepOptions) -> None:
        while wanted > 0:
            steps = next(size for size in self._sizes if size <= wanted)
            longest = 0
            for own in live:
                own.ahead += steps if group == 1 else steps * min(group, 1 + own.most_drafts)
                reach = own.stands + own.ahead
                if reach > own.last:
                    reach = own.last
                if reach > longest:
                    longest = reach
            self._device.launch(StepLaunch(longest, steps, group, options=options))
            self._in_flight.extend((group,) * steps)
            self._entries += steps * group
            wanted -= steps

    def _receive(self, held: Rows[HeldRow]) -> None:
        """Waits until each row has a token or has ended."""
        while live := [own for own in held if not own.ended]:
            if self._read_launch(live):
                continue
            if all(own.unreported for own in live):
                break
            if not self._in_flight:
                raise EngineFailed("a row has nothing in flight")
            self._device.wait()
        self._count_singles()

    def _read_launch(self, live: Rows[HeldRow]) -> bool:
        """Returns False while entries of the oldest step are missing."""
        if not self._in_flight:
            return False
        if self._in_flight[0] == 1:
            return self._read_singles(live)
        self._count_singles()
        found = []
        for own in live:
            entries = self._entries_of(own)
            if entries is None:
                return False
            found.append(entries)
        group = self._in_flight.popleft()
        self.read[group] += 1
        for own, entries in zip(live, found, strict=True):
            own.ahead -= min(group, 1 + own.most_drafts)
            own.number += len(entries)
            flags = entries[-1] >> 24 & FLAGS
            ids = [entry & TOKEN for entry in (entries[:-1] if flags & NO_TOKEN else entries)]
            own.unreported += ids
            own.stands += len(ids)
            own.ended = flags != 0
            self._note(own, group, entries)
        return True

    def _read_singles(self, live: Rows[HeldRow]) -> bool:
        """Takes in plain steps until one has not come or a row ends. They are many, so `_count_singles` counts several
        of them at once."""
        poll, in_flight, before = self._device.poll, self._in_flight, self._singles
        while in_flight and in_flight[0] == 1:
            behind, found = self._singles + 1, []
            for own in live:
                entry = poll(own.index, own.number + behind)
                if entry is None:
                    return self._singles > before
                found.append(entry)
            in_flight.popleft()
            self._singles, flagged = behind, False
            for own, entry in zip(live, found, strict=True):
                if entry <= TOKEN:
                    own.unreported.append(entry)
                else:
                    self._end(own, entry)
                    flagged = True
            if flagged:
                break
        return True

    @staticmethod
    def _end(own: HeldRow, entry: int) -> None:
        flags = entry >> 24 & FLAGS
        _require_fed(flags)
        own.ended = flags != 0
        if not flags & NO_TOKEN:
            own.unreported.append(entry & TOKEN)

    def _count_singles(self) -> None:
        """Moves ended rows, too: where these stand does not matter."""
        count, self._singles = self._singles, 0
        if count:
            self.read[1] += count
            for own in self._held.values():
                own.ahead -= count
                own.number += count
                own.stands += count

    def _entries_of(self, own: HeldRow) -> list[int] | None:
        poll, found, number = self._device.poll, [], own.number + 1
        while (entry := poll(own.index, number)) is not None:
            found.append(entry)
            flags = entry >> 24 & FLAGS
            _require_fed(flags)
            if flags != MORE:
                return found
            number += 1
        return None

    def _note(self, own: HeldRow, group: int, entries: Rows[int]) -> None:
        proposed, accepted = entries[-1] >> 28 & FLAGS, len(entries) - 1
        own.proposed += proposed
        own.accepted += accepted
        self.verified.append((own.sequence, VerifiedDraft(group, proposed, accepted)))


def in_flight(pipelines: Rows[Pipeline], rows: Rows[Row]) -> dict[int, int]:
    return {row.key: at for at, pipeline in enumerate(pipelines) for row in pipeline.in_flight(rows)}


def run_share(pipeline: Pipeline, share: Share, options: StepOptions) -> dict[int, RowResult]:
    if share.drain:
        return pipeline.drain(share.rows, options)
    return pipeline.step(share.rows, options, most_ahead=share.most_ahead)


def _require_fed(flags: int) -> None:
    if flags == PARKED:
        raise EngineFailed("a step was launched without a page for its token")
