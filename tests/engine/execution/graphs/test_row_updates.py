"""What the device is told, read as the kernels read it: a make-believe device whose rows choose by every parameter,
from biases and marks in memory that it knows by address. Its answers are those of eager's sampler."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as some
from msgspec.structs import replace

from engine.api import GREEDY, FinishReason, GenerationRequest
from engine.execution import device_sampling as sampled
from engine.execution.batch_pipeline import BatchPipeline, Changes
from engine.execution.graphs.first_tokens import first_token
from engine.execution.graphs.row_updates import RowUpdateEncoder
from engine.execution.pipeline import Pipeline, Rewrite, RowState, StepLaunch, in_flight, run_share
from engine.execution.router import ALL_OPTIONS, Capacity, Executors, Role
from engine.kernels import reference
from engine.kernels.batch_sampling import Tables
from engine.kernels.rows import ENTER, LEAVE, MOVE, PAGES, packed_words
from engine.kernels.sampling import BARRED, SEEN, SampledRow, write_bias, write_marks
from engine.sampling.sampler import Sampler
from engine.scheduling.limits import Limits
from engine.scheduling.plan import Row, RowResult, Share
from engine.scheduling.sequence_state import SequenceState, SequenceTable
from tests.engine.execution.slow_batches import BUCKETS, SlowBatches
from tests.engine.execution.slow_device import DeviceRow, Life, SlowDevice, SlowRunner, after, request
from tests.engine.stepped import holding, put
from tests.properties import example_count

VOCABULARY = 40
CPU = torch.device("cpu")
KINDS = (
    GREEDY,
    replace(GREEDY, temperature=0.8, seed=1),
    replace(GREEDY, temperature=0.9, top_p=0.8, seed=2),
    replace(GREEDY, temperature=1.2, top_k=6, min_p=0.05, seed=3),
    replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.4),
    replace(GREEDY, temperature=0.9, presence_penalty=1.6, frequency_penalty=0.3, seed=2**64 - 1),
    replace(GREEDY, temperature=1.0, seed=5, logit_bias=((7, 3.0), (9, -50.0))),
    replace(GREEDY, temperature=1.0, seed=6, top_p=0.7, repetition_penalty=0.8, logit_bias=((3, 2.0),)),
)


def logits_of(context: Rows[int]) -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(after(context))) * 3


def answer(asked: GenerationRequest, max_context: int) -> tuple[list[int], FinishReason]:
    """What eager brings it, alone."""
    state = SequenceState(
        0, 0, list(asked.token_ids), len(asked.token_ids), asked.sampling, asked.stopping, asked.logprobs
    )
    sampler = Sampler(VOCABULARY, 1, CPU)
    while True:
        (found,) = sampler.sample([state], logits_of(state.token_ids).unsqueeze(0))
        state.token_ids += found.token_ids
        made = state.token_ids[state.prompt_length :]
        if found.token_ids[0] in asked.stopping.stop_token_ids:
            return made, FinishReason.STOP
        if len(made) == asked.stopping.max_tokens or len(state.token_ids) == max_context:
            return made, FinishReason.LENGTH


@dataclass
class ChoosingRow(DeviceRow):
    """A row in the device's own memory, with what it chooses by."""

    temperature: float = 0.0
    noise_key: int = 0
    sampled: SampledRow | None = None
    bias: torch.Tensor = field(default_factory=lambda: torch.zeros(VOCABULARY))
    marks: torch.Tensor = field(default_factory=lambda: torch.zeros(VOCABULARY, dtype=torch.int32))


def choose(context: Rows[int], own: DeviceRow | SequenceState) -> int:
    """As `pick` and `sample` do; for a prompt as the sampler does."""
    logits = logits_of(context)
    if isinstance(own, SequenceState):
        return Sampler(VOCABULARY, own.slot + 1, CPU).sample([own], logits.unsqueeze(0))[0].token_ids[0]
    assert isinstance(own, ChoosingRow)
    place = len(context)
    if own.sampled is None:
        if place < own.free_from:
            logits[list(own.stops)] = float("-inf")
        heat, key, at = torch.tensor([own.temperature]), torch.tensor([own.noise_key]), torch.tensor([place])
        return int(reference.choose(logits.unsqueeze(0), heat, key, at))
    token = reference.sample(logits, own.sampled, place, own.bias, own.marks)
    assert token is not None
    if own.sampled.marked:
        own.marks[token] = (own.marks[token] | SEEN) + 1
    return token


def table(low: int, high: int, kind: type[ctypes.c_int32] | type[ctypes.c_float]) -> torch.Tensor | None:
    """What lies at an address of two words."""
    address = (high & 0xFFFFFFFF) << 32 | low & 0xFFFFFFFF
    return torch.from_numpy(np.ctypeslib.as_array((kind * VOCABULARY).from_address(address))) if address else None


def fill(words: Rows[int]) -> None:
    """As `batch_sampling.cu` does."""
    bias, marks = table(words[0], words[1], ctypes.c_float), table(words[2], words[3], ctypes.c_int32)
    parts, at = [], 8
    for count in (*words[4:8], words[7]):
        parts.append(list(words[at : at + count]))
        at += count
    assert at == len(words)
    given_ids, made, barred, biased, values = parts
    floats = struct.unpack(f"<{len(values)}f", struct.pack(f"<{len(values)}i", *values))
    if bias is not None:
        write_bias(bias, zip(biased, floats, strict=True))
    if marks is not None:
        write_marks(marks, given_ids, made, barred)


def entering(op: Rows[int]) -> ChoosingRow:
    """As `rows.cu` and `sampling.cuh` read it."""
    (heat,) = struct.unpack("<f", struct.pack("<i", op[6]))
    (key,) = struct.unpack("<q", struct.pack("<2i", op[7], op[8]))
    own = ChoosingRow(op[2], op[3], op[4], tuple(one for one in op[9:17] if one >= 0), op[5], 0, {}, heat, key)
    own.pages.update(enumerate(op[34:]))
    assert len(op) == 34 + op[17]
    packed = struct.pack("<16i", *op[18:34])
    uses, top_k, temperature, floor, repetition, presence, frequency, free_from, top_p, noise = struct.unpack(
        "<2i5fid q", packed[:48]
    )
    if uses:
        own.sampled = SampledRow(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=float(np.exp(np.float64(floor))),
            repetition=repetition,
            presence=presence,
            frequency=frequency,
            free_from=free_from,
            noise_key=noise,
            biased=bool(uses & 2),
            marked=bool(uses & 4),
        )
        bias, marks = table(op[30], op[31], ctypes.c_float), table(op[32], op[33], ctypes.c_int32)
        assert (bias is not None, marks is not None) == (own.sampled.biased, own.sampled.marked)
        own.bias = own.bias if bias is None else bias
        own.marks = own.marks if marks is None else marks
    return own


class KeptEncoder(RowUpdateEncoder):
    """A GPU's allocator gives memory away again in the order of the stream; here it is kept to the end."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, CPU)
        self.kept: list[torch.Tensor] = []

    def _table(self, dtype: torch.dtype) -> torch.Tensor:
        self.kept.append(torch.full((VOCABULARY,), 99, dtype=dtype))
        return self.kept[-1]


class EncodedBatches(SlowBatches):
    """Row states that know only what was encoded in words."""

    def __init__(self, seed: int, pages: int) -> None:
        super().__init__(seed, pages)
        self.encoder = KeptEncoder()
        self.rows = [ChoosingRow() for _ in self.rows]
        self.with_stages = self.without = 0

    def update(self, changes: Changes) -> None:
        encoded = self.encoder.encode(changes)
        for tables in encoded.tables:
            self.queue.append(partial(fill, tables.words()))
        for words in (encoded.rows, encoded.moves):
            mail = packed_words(words)
            for first, one in zip(mail, words, strict=False):
                self.queue.append(partial(self._change, mail[first : first + len(one)]))

    def _change(self, op: Rows[int]) -> None:
        kind, row = op[:2]
        if kind == LEAVE:
            self.rows[row].position = -1
        elif kind == PAGES:
            assert op[3] == len(op) - 4
            self.rows[row].pages.update(enumerate(op[4:], op[2]))
        elif kind == ENTER:
            self.rows[row] = entering(op)
        elif kind == MOVE:
            self.rows[row], self.rows[op[2]] = self.rows[op[2]], ChoosingRow()

    def launch(self, launch: StepLaunch) -> None:
        rows = launch.rows
        stages = self.encoder.sampled(rows)
        self.with_stages += stages
        self.without += not stages

        def check() -> None:
            asking = [own for own in self.rows[:rows] if own.position >= 0 and own.sampled is not None]  # type: ignore[attr-defined]
            assert stages or not asking, "a row asks for stages that the step does not have"

        self.queue.append(check)
        super().launch(launch)

    def choose(self, context: Rows[int], own: DeviceRow | SequenceState) -> int:
        return choose(context, own)


class FewRows(SlowDevice):
    """A few rows, told as the captured steps of few rows are."""

    def __init__(self, seed: int, beside: EncodedBatches) -> None:
        super().__init__(seed, 0)
        self.slots, self.queue = beside.slots, beside.queue
        self.buckets = {size: [ChoosingRow() for _ in range(size)] for size in (1, 2, 4, 8)}

    def write(self, update: Rewrite) -> None:
        super().write(update)
        for own, state in zip(self.buckets[self.here], update.rows, strict=False):
            self.queue.append(partial(self._choices, own, state, self._of(state)))

    @staticmethod
    def _of(state: RowState) -> tuple[SampledRow | None, list[int]]:
        row = sampled.sampled_row(state.sequence, len(state.unreported))
        return row, [*state.sequence.token_ids, *state.unreported]

    @staticmethod
    def _choices(own: ChoosingRow, state: RowState, known: tuple[SampledRow | None, list[int]]) -> None:
        own.sampled, ids = known
        own.temperature, own.noise_key = state.temperature, state.noise_key
        prompt, one = state.sequence.prompt_length, state.sequence
        own.bias, own.marks = torch.zeros(VOCABULARY), torch.zeros(VOCABULARY, dtype=torch.int32)
        write_bias(own.bias, one.sampling.logit_bias)
        write_marks(own.marks, ids[:prompt], ids[prompt:], one.stopping.stop_token_ids)

    def choose(self, context: Rows[int], own: DeviceRow | SequenceState) -> int:
        return choose(context, own)


class SampledLife(Life):
    """Few rows are the captured steps', more are the batch's; all kinds of parameters beside each other."""

    def __init__(self, seed: int, pages: int, most: int) -> None:
        self.batches = EncodedBatches(seed, pages)
        self.sequences = SequenceTable()
        self.batch = BatchPipeline(self.batches, self.sequences, 150, BUCKETS)
        self.few = FewRows(seed, self.batches)
        self.pipeline = Pipeline(self.few, self.sequences, 150)
        limits = Limits(
            max_sequences=most, max_batch_tokens=64, max_context=150, lookahead_tokens=15, max_tokens_per_row=16
        )
        capacity, few = Capacity(few=1, many=BUCKETS[-1]), Few(self)
        computing = {Role.FEW: few, Role.MANY: Many(self)}
        runner = SlowRunner(self.batches, capacity, computing, self.sequences, Executors({Role.FEW: few}))
        super().__init__(seed, runner, limits)

    def admit(self) -> None:
        prompt = [self.random.randrange(VOCABULARY) for _ in range(self.random.choice((1, 2, 16, 17, 30)))]
        stops = tuple(self.random.sample(range(VOCABULARY), self.random.choice((0, 0, 1, 3))))
        asked = request(
            prompt,
            max_tokens=self.random.choice((1, 2, 17, 40)),
            min_tokens=self.random.choice((0, 9)),
            stop_token_ids=stops,
        )
        self.take(replace(asked, sampling=self.random.choice(KINDS)))

    def check(self) -> None:
        for key, asked in enumerate(self.asked):
            ids, reason = answer(asked, self.max_context)
            if key in self.ended:
                assert (self.got[key], self.ended[key]) == (ids, reason), asked
            else:
                assert key in self.gone
                assert self.got[key] == ids[: len(self.got[key])]


@dataclass
class Few:
    """The captured steps of few rows."""

    life: SampledLife

    def in_flight(self, rows: tuple[Row, ...]) -> dict[int, int]:
        return in_flight([self.life.pipeline], rows)

    def run(self, share: Share) -> dict[int, RowResult]:
        return run_share(self.life.pipeline, share, ALL_OPTIONS)


@dataclass
class Many:
    """The batch."""

    life: SampledLife

    def run(self, share: Share) -> dict[int, RowResult]:
        return self.life.batch.step(share.rows)


@pytest.mark.product
@given(seed=some.integers(0, 2**32), pages=some.integers(40, 120), most=some.sampled_from((9, 12)))
@examples(max_examples=example_count(12), deadline=None)
def test_every_row_chooses_as_eager_does_wherever_it_is(seed: int, pages: int, most: int) -> None:
    life = SampledLife(seed, pages, most)
    life.live(16)
    life.check()


def test_counts_go_along_to_the_batch_and_back() -> None:
    life = SampledLife(3, 200, 12)
    for key in range(11):
        asked = request([key, 6, 7], max_tokens=90 if key < 4 else 30)
        life.take(replace(asked, sampling=KINDS[4 + key % 4]))
    while life.step():
        pass
    life.check()
    assert life.batches.with_stages > 10
    assert life.batches.without == 0
    assert life.few.launched > 40  # the last rows are the captured steps' again


def entered(table: SequenceTable, index: int, asked: GenerationRequest) -> Changes:
    pipeline = BatchPipeline(SlowBatches(1, 50), table, 150, BUCKETS)
    state = put(table, holding(asked, range(10), index))
    pipeline._free = [index]
    return Changes(entered=(pipeline._enter(Row(index, index, len(state.token_ids) - 1, 1, True)),))


def test_only_rows_that_ask_have_memory_and_give_it_back() -> None:
    encoder, table = KeptEncoder(), SequenceTable()
    wanted = [[], [], [], [], [torch.int32], [torch.int32], [torch.float32], [torch.float32, torch.int32]]
    for index, kind in enumerate(KINDS):
        encoder.kept.clear()
        encoded = encoder.encode(entered(table, index, replace(request([1, 2, 3]), sampling=kind)))
        assert [one.dtype for one in encoder.kept] == wanted[index]
        assert len(encoded.tables) == bool(wanted[index])
        assert encoder.sampled(index + 1) == (index >= 2)
    barred = request([1, 2, 3], min_tokens=5, stop_token_ids=(4,))
    encoder.kept.clear()
    encoder.encode(entered(table, 8, barred))  # `pick` bars by itself
    assert not encoder.kept
    (tables,) = encoder.encode(entered(table, 9, replace(barred, sampling=KINDS[2]))).tables
    fill(tables.words())
    assert tables.marks is not None
    assert bool(tables.marks[4] & BARRED)
    assert not encoder.sampled(2)
    encoder.encode(Changes(left=(2, 3, 9), moved=((0, 4),)))
    assert encoder.sampled(1)
    encoder.encode(Changes(left=(0, 5, 6, 7)))
    assert not encoder.sampled(BUCKETS[-1])


def test_words_of_tables() -> None:
    words = Tables(bias=None, marks=None, given=[1, 2], made=[3], barred=[4], biases=[(5, 0.5), (6, -1.0)]).words()
    assert words == [0, 0, 0, 0, 2, 1, 1, 2, 1, 2, 3, 4, 5, 6, 0x3F000000, -0x40800000]


def test_first_tokens_are_told_as_rows_that_end_at_once() -> None:
    table, encoder = SequenceTable(), KeptEncoder()
    for index, kind in enumerate((KINDS[0], KINDS[2], KINDS[7])):
        asked = replace(request([1, 2, 3], min_tokens=2, stop_token_ids=(9,)), sampling=kind)
        state = put(table, holding(asked, range(3), index))
        encoded = encoder.encode(Changes(entered=(first_token(index, state),)))
        for tables in encoded.tables:
            fill(tables.words())
        own = entering(encoded.rows[0])
        assert (own.position, own.last, own.free_from, own.pages) == (2, 3, 5, {})
        (wanted,) = Sampler(VOCABULARY, index + 1, CPU).sample([state], logits_of(state.token_ids).unsqueeze(0))
        assert choose(state.token_ids, own) == wanted.token_ids[0]
