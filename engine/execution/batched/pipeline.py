"""Which rows the device holds, what it is told of those that come and go, and how many steps run ahead of their tokens.

Torch-free. A step moves the first so many row states, a batch bucket; the rest of a bucket is idle.

- What changes is told between two launches and holds from the next one on. Rows that stay are told nothing, so steps
  under way go on: their tokens are read when they come, each as the rows stood when the step was launched.
- Nothing is launched that a row's pages do not reach, nor beyond the last token of all rows. Pages must reach
  MOST_AHEAD - 1 tokens beyond a row's first new one, or to its end: else rows that come could not be moved.
- Steps under way for a row that has left come before anything later on the same stream: a page that went to another
  owner is written by the old one's steps first, and by the new one's after that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Protocol

from engine.errors import EngineFailed
from engine.scheduling.plan import Row, RowResult
from engine.scheduling.sequence_state import SequenceState, SequenceTable
from engine.settings import PAGE_SIZE

AHEAD = 2  # steps under way when a call returns: one runs, and one is there when it ends
MOST_AHEAD = 2 * AHEAD  # steps not yet read, when rows come
NO_TOKEN = 4  # flag of an entry; any other flag ends its row as well
_FAR = 1 << 62


@dataclass(slots=True, eq=False)
class BatchRow:
    """A row that the device holds."""

    sequence: SequenceState
    index: int  # among the row states
    position: int  # of the token that the first unread step feeds
    last: int  # position of its last token
    since: int  # number of the first step that moved it
    first: int  # position of the token that this step fed
    pages: int  # so many does the device know
    exchanges: int  # of the sequence's pages, when they were written
    unreported: list[int] = field(default_factory=list)
    gone: bool = False  # ended, or no longer wanted: nothing more is read for it

    @property
    def reach(self) -> int:
        """Number of the last step that its pages allow; far off where they suffice to its end."""
        held = self.pages * PAGE_SIZE
        return _FAR if held >= self.last else self.since + held - 1 - self.first

    @property
    def end(self) -> int:
        """Number of its last step."""
        return self.since + self.last - 1 - self.first


@dataclass(frozen=True, slots=True)
class Changes:
    """What the device is told before a launch. No index is named twice, but for moves, which come last."""

    left: tuple[int, ...] = ()
    entered: tuple[BatchRow, ...] = ()
    paged: tuple[tuple[int, int, tuple[int, ...]], ...] = ()  # index, first page, pages
    moved: tuple[tuple[int, int], ...] = ()  # index to, index from

    def __bool__(self) -> bool:
        return bool(self.left or self.entered or self.paged or self.moved)


class StepDevice(Protocol):
    """The device: every call but `poll` and `wait` is queued behind those before it."""

    def change(self, changes: Changes) -> None: ...

    def launch(self, rows: int) -> None:
        """One step of the first `rows` row states, a batch bucket. The first is number 1."""

    def poll(self, number: int, rows: int) -> Rows[int] | None:
        """flags << 24 | token of each row state, once all of this step have come."""

    def wait(self) -> None:
        """A moment. Raises where nothing is under way."""


class BatchPipeline:
    """The rows on the device and the steps under way."""

    def __init__(
        self, device: StepDevice, sequences: SequenceTable, max_context: int, buckets: tuple[int, ...]
    ) -> None:
        self._device = device
        self._sequences = sequences
        self._max_context = max_context
        self._buckets = buckets
        self._held: dict[int, BatchRow] = {}  # by key
        self._layout: list[BatchRow | None] = [None] * buckets[-1]  # by index; those gone until the device is told
        self._free = list(range(buckets[-1]))  # a heap
        self._under_way: deque[tuple[BatchRow | None, ...]] = deque()  # of each step, the rows it moves
        self._launched = 0  # number of the last step
        self._moving: tuple[BatchRow | None, ...] = ()  # what the next step moves
        self._joined = 0  # number of the first step that moves all rows
        self._useful = 0  # number of the last step that all pages allow and some row needs

    @property
    def most_rows(self) -> int:
        """Rows that it can step at once."""
        return len(self._layout)

    def holds(self, key: int) -> bool:
        """Whether the sequence is among its rows."""
        return key in self._held

    def step(self, rows: Rows[Row]) -> dict[int, RowResult]:
        """At least one id for each row, and whatever else has come."""
        try:
            changes = self._agree(rows)
            if changes:
                self._device.change(changes)
                live = [own for own in self._held.values() if not own.gone]
                self._useful = min(max(own.end for own in live), min(own.reach for own in live))
            # A wave of newcomers goes on, most likely: steps that they could still join wait for them.
            ahead = 1 if 4 * len(changes.entered) >= len(self._held) else AHEAD
            self._launch(ahead)
            self._receive()
            self._launch(ahead)
        except BaseException:
            self._abandon()
            raise
        return {key: _report(own) for key, own in self._held.items()}

    def _abandon(self) -> None:
        """None of the rows goes on; the device is told with the next step."""
        for own in self._held.values():
            own.gone = True
        self._held = {}

    # Rows

    def _agree(self, rows: Rows[Row]) -> Changes:
        """Makes the rows the plan's; what the device must be told."""
        before, fresh, paged = self._held, [], []
        held: dict[int, BatchRow] = {}
        for row in rows:
            own = before.get(row.key)
            if own is None or not self._continues(own, row):
                fresh.append(row)
                continue
            held[row.key] = own
            pages = own.sequence.pages
            if len(pages) > own.pages:
                paged.append((own.index, own.pages, tuple(pages[own.pages :])))
                own.pages = len(pages)
        if len(held) == len(before) and not fresh:
            return Changes(paged=tuple(paged))
        left = self._clear(held)
        entered = [self._enter(row) for row in fresh]
        for own in entered:
            held[own.sequence.key] = own
        self._held = held
        moved = self._compact(len(held))
        freed = tuple(index for index in left if self._layout[index] is None)
        self._moving = tuple(self._layout[: self._bucket(len(held))])
        return Changes(freed, tuple(entered), tuple(paged), moved)

    def _continues(self, own: BatchRow, row: Row) -> bool:
        """Whether the device left the row where the plan takes it up."""
        if own.gone or own.position - len(own.unreported) != row.start:
            return False
        sequence = self._sequences.of(row)
        return own.sequence is sequence and own.exchanges == sequence.exchanges

    def _clear(self, held: dict[int, BatchRow]) -> list[int]:
        """Takes the rows that are not `held` out of the layout; their indexes."""
        left = []
        for index, own in enumerate(self._layout):
            if own is not None and held.get(own.sequence.key) is not own:
                own.gone = True
                self._layout[index] = None
                heappush(self._free, index)
                left.append(index)
        return left

    def _enter(self, row: Row) -> BatchRow:
        if not self._free:
            raise EngineFailed(f"more than {len(self._layout)} rows")
        sequence = self._sequences.of(row)
        last = sequence.last_position(self._max_context)
        index = heappop(self._free)
        self._joined = self._launched + 1
        own = BatchRow(
            sequence, index, row.start, last, self._joined, row.start, len(sequence.pages), sequence.exchanges
        )
        self._layout[index] = own
        return own

    def _compact(self, rows: int) -> tuple[tuple[int, int], ...]:
        """Moves rows down where they then fit a smaller bucket; (to, from) each."""
        border = self._bucket(rows)
        moved = []
        for index in range(border, len(self._layout)):
            own = self._layout[index]
            if own is not None:
                own.index = heappop(self._free)
                self._layout[own.index], self._layout[index] = own, None
                moved.append((own.index, index))
        if moved:
            self._free = [index for index, own in enumerate(self._layout) if own is None]
            heapify(self._free)
        return tuple(moved)

    def _bucket(self, rows: int) -> int:
        return next(size for size in self._buckets if size >= rows)

    # Steps

    def _launch(self, ahead: int) -> None:
        """Launches so far ahead, where it is allowed and of use."""
        read = self._launched - len(self._under_way)
        wanted = min(max(read, self._joined - 1) + ahead, self._useful)
        while self._launched < wanted:
            self._device.launch(len(self._moving))
            self._launched += 1
            self._under_way.append(self._moving)

    def _receive(self) -> None:
        """Reads what has come; waits where a row would be left without."""
        while True:
            if self._read_step():
                continue
            if all(own.unreported or own.gone for own in self._held.values()):
                return
            if not self._under_way:
                raise EngineFailed("a row has nothing under way")
            self._device.wait()

    def _read_step(self) -> bool:
        """Takes in the next step where it has come."""
        if not self._under_way:
            return False
        moving = self._under_way[0]
        entries = self._device.poll(self._launched - len(self._under_way) + 1, len(moving))
        if entries is None:
            return False
        self._under_way.popleft()
        for own, entry in zip(moving, entries, strict=True):
            if own is None or own.gone:
                continue
            own.position += 1
            if not entry >> 24 & NO_TOKEN:
                own.unreported.append(entry & 0xFFFFFF)
            if entry >> 24:
                own.gone = True
        return True


def _report(own: BatchRow) -> RowResult:
    ids, own.unreported = tuple(own.unreported), []
    return RowResult(ids)
