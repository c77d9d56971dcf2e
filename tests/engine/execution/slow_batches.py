"""A slow make-believe device of many rows. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from engine.execution.batch_pipeline import MOST_BATCH_AHEAD, Changes
from engine.execution.pipeline import StepLaunch
from tests.engine.execution.slow_device import DeviceRow, SlowMemory

BUCKETS = (2, 4, 6, 12)
IDLE = 128


class SlowBatches(SlowMemory):
    """Row states and steps. What is told of a row twice at once, or moved while told, is a mistake."""

    def __init__(self, seed: int, pages: int, sick: int = -1, buckets: tuple[int, ...] = BUCKETS) -> None:
        super().__init__(seed, pages, sick)
        self.rows = [DeviceRow() for _ in range(buckets[-1])]
        self.entries: dict[int, list[int]] = {}
        self.launched: list[int] = []  # rows of each step
        self.told: list[Changes] = []
        self.stepped = 0

    def update(self, changes: Changes) -> None:
        self.told.append(changes)
        named = [*changes.left, *(own.index for own in changes.entered), *(more.index for more in changes.paged)]
        entered = [
            (own.index, own.sequence, own.first, own.last, tuple(own.sequence.pages[: own.pages]))
            for own in changes.entered
        ]
        froms = {to: source for to, source in changes.moved}
        assert len(set(named)) == len(named)
        assert not set(froms) & set(froms.values())

        def do() -> None:
            for index in changes.left:
                self.rows[index].position = -1
            for more in changes.paged:
                self.rows[more.index].pages.update(enumerate(more.pages, more.first))
            for index, sequence, first, last, pages in entered:
                stops, limits = sequence.stopping.stop_token_ids, sequence.stopping
                free_from = sequence.prompt_length + limits.min_tokens
                own = DeviceRow(sequence.token_ids[first], first, last, stops, free_from)
                own.pages.update(enumerate(pages))
                self.rows[index] = own
            for to, source in changes.moved:
                self.rows[to], self.rows[source] = self.rows[source], DeviceRow()

        self.queue.append(do)

    def launch(self, launch: StepLaunch) -> None:
        rows = launch.rows
        assert rows in BUCKETS
        self.launched.append(rows)
        number = len(self.launched)

        def step() -> None:
            self.stepped += 1
            assert self.stepped == number
            moved = self.rows[:rows]
            self.entries[number] = [self.move_on(own) if own.position >= 0 else IDLE << 24 for own in moved]
            self.entries.pop(number - 2 * MOST_BATCH_AHEAD, None)
            assert all(own.position < 0 for own in self.rows[rows:]), "a row outside the bucket"

        self.queue.append(step)

    def poll(self, number: int, rows: int) -> Rows[int] | None:
        self.work()
        found = self.entries.get(number)
        assert found is None or len(found) == rows
        return found
