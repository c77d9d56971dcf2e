"""Masked steps, in two halves, without a GPU: on a slow make-believe device, beside rows that are launched ahead."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Rows

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as some
from msgspec.structs import replace

from engine.api import Constraint, GenerationRequest
from engine.execution.masked_pipeline import MaskedPipeline
from engine.execution.pipeline import BUCKETS, Mask, Pipeline, Rewrite, StepLaunch, in_flight, run_share
from engine.execution.router import AHEAD, ALL_OPTIONS, Capacity, Executors, Role
from engine.scheduling.limits import Limits
from engine.scheduling.plan import Row, RowResult, Share
from engine.scheduling.sequence_state import SequenceTable
from engine.settings import PAGE_SIZE
from tests.engine.execution.slow_device import SICK, Life, SlowDevice, SlowRunner, answer, request
from tests.properties import example_count

RING = 64


class HalvesDevice(SlowDevice):
    """A step of it is fed and then chosen; a mask says for which place of its sequence it was made."""

    def __init__(self, seed: int, pages: int, sick: int = -1, beside: SlowDevice | None = None) -> None:
        super().__init__(seed, pages, sick, beside)
        self.fed: dict[int, int] = {}  # by row: the place that was fed last
        self.feedings = self.draws = 0

    def write(self, update: Rewrite) -> None:
        super().write(update)
        self.queue.append(self.fed.clear)

    def launch(self, launch: StepLaunch) -> None:
        assert launch.half is not None
        if launch.half.masks is None:
            self.feed(launch.longest)
        else:
            self.draw(launch.half.masks)

    def feed(self, longest: int) -> None:
        rows = self.buckets[self.here]
        self.feedings += 1

        def feed() -> None:
            for at, own in enumerate(rows):
                if own.position >= 0:
                    assert own.position < longest, "a row outgrew its launch"
                    assert self.fed.get(at) != own.position, "fed twice without a start"
                    self.slots[own.pages[own.position // PAGE_SIZE]][own.position % PAGE_SIZE] = own.token
                    self.fed[at] = own.position

        self.queue.append(feed)

    def draw(self, masks: Mapping[int, Mask]) -> None:
        width, self.draws = self.here, self.draws + 1

        def draw() -> None:
            for at, own in enumerate(self.buckets[width]):
                if own.position < 0:
                    continue
                assert self.fed[at] == own.position, "drawn, and not fed"
                assert at not in masks or int.from_bytes(masks[at], "little") == own.position + 1, "an older mask"
                entry = self.move_on(own)
                self.rings[width, at, (own.count - 1) % RING] = own.count, entry

        self.queue.append(draw)


class Halves:
    """What decodes steps with a constrained row in them, which know how long their sequence is."""

    def __init__(self, device: HalvesDevice, sequences: SequenceTable, max_context: int) -> None:
        self.sequences = sequences
        self.pipeline = MaskedPipeline(device, sequences, max_context, self)
        self.known: dict[int, int] = {}
        self.late, self.chance = 0.0, random.Random(1)  # share of masks that are late

    def ready(self, key: int) -> bool:
        """Where a mask is late the next step is drawn when it is planned."""
        return self.chance.random() >= self.late

    def mask(self, key: int) -> Mask:
        return self.known[key].to_bytes(4, "little")

    def take(self, rows: Rows[Row], found: dict[int, RowResult]) -> dict[int, RowResult]:
        for key, result in found.items():
            self.known[key] += len(result.token_ids)
        return found

    def run(self, share: Share) -> dict[int, RowResult]:
        self.known = {row.key: len(self.sequences.of(row).token_ids) for row in share.rows}
        return self.pipeline.masked_step(share.rows)


class Ahead:
    """Decodes the others."""

    def __init__(self, device: SlowDevice, sequences: SequenceTable, max_context: int) -> None:
        self.pipeline = Pipeline(device, sequences, max_context)

    def in_flight(self, rows: tuple[Row, ...]) -> dict[int, int]:
        return in_flight([self.pipeline], rows)

    def run(self, share: Share) -> dict[int, RowResult]:
        return run_share(self.pipeline, share, ALL_OPTIONS)


class HalvesLife(Life):
    """Some sequences with a constraint, some without."""

    def __init__(self, seed: int, pages: int, lookahead: int, sick: int, most: int = 8) -> None:
        chance = random.Random(seed)
        self.device, self.share = HalvesDevice(seed, pages, sick), chance.choice((0.2, 0.5, 1.0))
        limits = Limits(
            max_sequences=most,
            max_batch_tokens=chance.choice((5, 64)),
            max_context=min(150, pages * PAGE_SIZE),
            lookahead_tokens=lookahead,
            max_tokens_per_row=2 * AHEAD,
        )
        sequences, context = SequenceTable(), limits.max_context
        ahead = Ahead(SlowDevice(seed + 1, pages, sick, self.device), sequences, context)
        self.halves = Halves(self.device, sequences, context)
        capacity, computing = (
            Capacity(masked=BUCKETS[-1], few=1),
            {Role.MASKED: self.halves, Role.FEW: ahead},
        )
        runner = SlowRunner(self.device, capacity, computing, sequences, Executors({Role.FEW: ahead}))
        super().__init__(seed, runner, limits)

    def take(self, asked: GenerationRequest) -> None:
        super().take(replace(asked, constraint=Constraint("x")) if self.random.random() < self.share else asked)


@pytest.mark.product
@given(
    seed=some.integers(0, 2**32),
    pages=some.integers(6, 60),
    ahead=some.sampled_from((0, 1, 15)),
    sick=some.sampled_from((-1, SICK)),
    most=some.sampled_from((1, 3, 8, 12)),
)
@examples(max_examples=example_count(60))
def test_whatever_happens_each_answer_is_its_own(seed: int, pages: int, ahead: int, sick: int, most: int) -> None:
    life = HalvesLife(seed, pages, ahead, sick, most)
    life.halves.late = seed % 3 / 4
    life.live(12)
    life.check()


def alone(**stopping: object) -> HalvesLife:
    life = HalvesLife(1, 40, 2, -1)
    life.share = 1.0
    life.take(request([5, 6, 7], **stopping))
    return life


def test_a_step_is_drawn_before_the_tokens_of_the_one_before_it_are_handed_on() -> None:
    life = alone(max_tokens=50)
    while life.step():
        if 2 < len(life.got[0]) < 48:
            assert life.device.draws == len(life.got[0])  # one more than was told, but for the prompt's own token
            assert life.device.feedings == life.device.draws + 1
    life.check()
    assert life.device.written == 1
    assert life.device.draws == life.device.feedings == 49


def test_a_stop_ends_the_row_on_the_device() -> None:
    ids, _ = answer(request([5, 6, 7]), 150, -1)
    life = alone(max_tokens=100, stop_token_ids=(ids[20],))
    while life.step():
        pass
    life.device.flush()
    assert life.got[0] == ids[: ids.index(ids[20]) + 1]
    assert all(own.position == -1 for rows in life.device.buckets.values() for own in rows)
