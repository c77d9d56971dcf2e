"""Launches steps of many rows by the rules of `engine.execution.pipeline`; between two launches, the device gets only
what changes. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Protocol

from engine.errors import EngineFailed
from engine.execution.pipeline import FAR, NO_TOKEN, TOKEN, HeldRow, MorePages, StepLaunch, bucket
from engine.execution.router import ALL_OPTIONS, StepOptions
from engine.scheduling.plan import Row, RowResult
from engine.scheduling.sequence_state import SequenceTable
from engine.settings import PAGE_SIZE

BATCH_AHEAD = 2  # steps of many rows in flight when a call returns: one runs, and one is there when it ends
MOST_BATCH_AHEAD = 2 * BATCH_AHEAD  # the same, not yet read, when rows come


@dataclass(slots=True, eq=False)
class BatchRow(HeldRow):
    since: int = 0  # number of the first step that moved it
    first: int = 0  # position of the token that this step fed

    @property
    def reach(self) -> int:
        """Returns the number of the last step that the row's pages allow; FAR where they suffice to its end."""
        held = self.pages * PAGE_SIZE
        return FAR if held >= self.last else self.since + held - 1 - self.first

    @property
    def end(self) -> int:
        return self.since + self.last - 1 - self.first


@dataclass(frozen=True, slots=True)
class Changes:
    """No index occurs twice except in `moved`, which the device applies last."""

    left: tuple[int, ...] = ()
    entered: tuple[BatchRow, ...] = ()
    paged: tuple[MorePages, ...] = ()
    moved: tuple[tuple[int, int], ...] = ()  # index to, index from

    def __bool__(self) -> bool:
        return bool(self.left or self.entered or self.paged or self.moved)


class BatchDevice(Protocol):
    """Runs steps of many rows; see `RowDevice`."""

    def update(self, update: Changes) -> None: ...

    def launch(self, launch: StepLaunch) -> None:
        """Launches are numbered from 1 on."""

    def poll(self, number: int, rows: int) -> Rows[int] | None:
        """Returns flags << 24 | token of each row state, once all of a launch have arrived."""

    def wait(self) -> None: ...


class BatchPipeline:
    """Launches steps of the first row states, a bucket of them, of which unused ones idle. Rows that stay need no
    update, so their steps stay in flight: each is read with the rows that it was launched for. Pages must reach
    MOST_BATCH_AHEAD - 1 tokens beyond a row's first new one, or to its end, else newcomers could get no step."""

    def __init__(
        self, device: BatchDevice, sequences: SequenceTable, max_context: int, buckets: tuple[int, ...]
    ) -> None:
        self._device = device
        self._sequences = sequences
        self._max_context = max_context
        self._buckets = buckets
        self._held: dict[int, BatchRow] = {}  # by key
        self._layout: list[BatchRow | None] = [None] * buckets[-1]  # by index; those ended until the device is told
        self._free = list(range(buckets[-1]))  # a heap
        self._in_flight: deque[tuple[BatchRow | None, ...]] = deque()  # of each step, the rows it moves
        self._launched = 0  # number of the last step
        self._moving: tuple[BatchRow | None, ...] = ()  # what the next step moves
        self._joined = 0  # number of the first step that moves all rows
        self._useful = 0  # number of the last step that all pages allow and some row needs

    def step(self, rows: Rows[Row], options: StepOptions = ALL_OPTIONS) -> dict[int, RowResult]:
        try:
            changes = self._agree(rows)
            if changes:
                self._device.update(changes)
                live = [own for own in self._held.values() if not own.ended]
                self._useful = min(max(own.end for own in live), min(own.reach for own in live))
            # A wave of newcomers goes on, most likely: steps that they could still join wait for them.
            ahead = 1 if 4 * len(changes.entered) >= len(self._held) else BATCH_AHEAD
            launch = StepLaunch(rows=len(self._moving), options=options)
            self._launch(ahead, launch)
            self._receive()
            self._launch(ahead, launch)
        except BaseException:
            self._abandon()
            raise
        return {key: own.report() for key, own in self._held.items()}

    def _abandon(self) -> None:
        """The next update removes all rows from the device."""
        for own in self._held.values():
            own.ended = True
        self._held = {}

    # Rows

    def _agree(self, rows: Rows[Row]) -> Changes:
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
                paged.append(MorePages(own.index, own.pages, tuple(pages[own.pages :])))
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
        self._moving = tuple(self._layout[: bucket(len(held), self._buckets)])
        return Changes(freed, tuple(entered), tuple(paged), moved)

    def _continues(self, own: BatchRow, row: Row) -> bool:
        if own.ended or own.stands - len(own.unreported) != row.start:
            return False
        sequence = self._sequences.of(row)
        return own.sequence is sequence and own.page_table_version == sequence.page_table_version

    def _clear(self, held: Mapping[int, BatchRow]) -> list[int]:
        """Removes all but the `held` rows. Returns their indexes."""
        left = []
        for index, own in enumerate(self._layout):
            if own is not None and held.get(own.sequence.key) is not own:
                own.ended = True
                self._layout[index] = None
                heappush(self._free, index)
                left.append(index)
        return left

    def _enter(self, row: Row) -> BatchRow:
        if not self._free:
            raise EngineFailed(f"more than {len(self._layout)} rows")
        sequence = self._sequences.of(row)
        last, index = sequence.last_position(self._max_context), heappop(self._free)
        self._joined = self._launched + 1
        own = BatchRow(
            sequence,
            index,
            row.start,
            last,
            len(sequence.pages),
            sequence.page_table_version,
            since=self._joined,
            first=row.start,
        )
        self._layout[index] = own
        return own

    def _compact(self, rows: int) -> tuple[tuple[int, int], ...]:
        """Moves rows into the smallest bucket that holds all. Returns (to, from) of each."""
        border = bucket(rows, self._buckets)
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

    # Steps

    def _launch(self, ahead: int, launch: StepLaunch) -> None:
        read = self._launched - len(self._in_flight)
        wanted = min(max(read, self._joined - 1) + ahead, self._useful)
        while self._launched < wanted:
            self._device.launch(launch)
            self._launched += 1
            self._in_flight.append(self._moving)

    def _receive(self) -> None:
        while True:
            if self._read_step():
                continue
            if all(own.unreported or own.ended for own in self._held.values()):
                return
            if not self._in_flight:
                raise EngineFailed("a row has nothing in flight")
            self._device.wait()

    def _read_step(self) -> bool:
        if not self._in_flight:
            return False
        moving = self._in_flight[0]
        entries = self._device.poll(self._launched - len(self._in_flight) + 1, len(moving))
        if entries is None:
            return False
        self._in_flight.popleft()
        for own, entry in zip(moving, entries, strict=True):
            if own is None or own.ended:
                continue
            own.stands += 1
            if not entry >> 24 & NO_TOKEN:
                own.unreported.append(entry & TOKEN)
            if entry >> 24:
                own.ended = True
        return True
