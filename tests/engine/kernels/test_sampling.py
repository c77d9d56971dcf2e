"""The oracle of the sampling kernels against the sampler of eager, and what the host tells the kernels."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.api import GREEDY, SamplingParams, Stopping
from engine.execution import device_sampling as sampled
from engine.kernels import batch_sampling, reference
from engine.kernels.attention import RowPages
from engine.kernels.prefill import ProductParts
from engine.kernels.sampling import BARRED, COUNT, SEEN, SampledRow, Sampling, allocate, blocks, sampling
from engine.kernels.tokens import Choice
from engine.model.layers.few_rows import ChainPlan, StepWeights, prepare_step
from engine.model.layers.few_rows import allocate as allocate_step
from engine.sampling.noise import seed_key
from engine.sampling.sampler import NARROW, Sampler
from engine.scheduling.sequence_state import SequenceState
from tests.properties import example_count

CPU = torch.device("cpu")
PLAIN = replace(GREEDY, temperature=1.0)
ids = st.integers(0, 39)
parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-30, 1e-6, 0.3, 1.0, 1.9, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 39, 40, 41, 129, 1 << 32]),
    top_p=st.sampled_from([1.0, 1.0, 0.0, 0.2, 0.9, 0.95, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, -0.6, 1.1]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.2, 0.8]),
    seed=st.integers(0, (1 << 64) - 1),
    logit_bias=st.lists(
        st.tuples(ids, st.sampled_from([-100.0, -0.3, 4.5, 100.0])), max_size=3, unique_by=lambda pair: pair[0]
    ).map(tuple),
)
stoppings = st.builds(
    lambda least, stops: Stopping(max_tokens=99, min_tokens=least, stop_token_ids=tuple(stops)),
    st.sampled_from([0, 0, 3, 20]),
    st.lists(ids, max_size=3),
)


def make(params: SamplingParams, stopping: Stopping, prompt: list[int], output: list[int]) -> SequenceState:
    return SequenceState(
        key=0,
        slot=0,
        token_ids=prompt + output,
        prompt_length=len(prompt),
        sampling=params,
        stopping=stopping,
        logprobs=None,
    )


def make_logits(kind: str, vocabulary: int, salt: int) -> torch.Tensor:
    """Shapes that filters stumble over."""
    noise = torch.randn(vocabulary, generator=torch.Generator().manual_seed(salt))
    match kind:
        case "smooth":
            return noise * 3
        case "ties":
            return noise.round()
        case "flat":
            return torch.full((vocabulary,), -7.25)
        case "one hot":
            return torch.full((vocabulary,), -30.0).index_fill_(0, torch.tensor([salt % vocabulary]), 30.0)
        case "wide":
            return noise * 1e4
    poison = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}[kind]
    return noise.index_fill_(0, torch.tensor([salt % vocabulary]), poison)


def eager(sequence: SequenceState, logits: torch.Tensor) -> int | None:
    (found,) = Sampler(logits.shape[0], 1, CPU).sample([sequence], logits.unsqueeze(0))
    return found.token_ids[0] if found.token_ids else None


@pytest.mark.product
@given(
    params=parameters,
    stopping=stoppings,
    prompt=st.lists(ids, min_size=1, max_size=12),
    output=st.lists(ids, max_size=12),
    kind=st.sampled_from(["smooth", "smooth", "ties", "flat", "one hot", "wide", "nan", "inf", "-inf"]),
    vocabulary=st.sampled_from([40, NARROW + 1, 400]),
    salt=st.integers(0, 1000),
)
@settings(max_examples=example_count(600), deadline=None)
def test_the_oracle_is_the_eager_sampler(
    params: SamplingParams,
    stopping: Stopping,
    prompt: list[int],
    output: list[int],
    kind: str,
    vocabulary: int,
    salt: int,
) -> None:
    sequence = make(params, stopping, prompt, output)
    logits = make_logits(kind, vocabulary, salt)
    state = allocate(1, vocabulary, CPU)
    wanted = eager(sequence, logits)
    kept = len(output) // 2  # the rest is not the sequence's yet
    whole, sequence = sequence, make(params, stopping, prompt, output[:kept])
    sampled.place(state, 0, sequence, output[kept:])
    row = sampled.sampled_row(whole)
    assert sampled.needed(sequence, len(output) - kept) == sampled.needed(whole) == (row is not None)
    if row is None:
        assert params.temperature == 0 or (params.top_k, params.top_p, params.min_p) == (0, 1.0, 0.0)
        return
    found = reference.sample(logits, row, len(whole.token_ids), state.bias[0], state.marks[0])
    assert found == wanted


def test_a_tie_is_kept_whole_by_every_filter() -> None:
    heat = torch.tensor([0.0, -1.0, -1.0, -1.0, -2.0])
    for row in (
        SampledRow(temperature=1.0, top_k=2),
        SampledRow(temperature=1.0, top_p=0.5),
        SampledRow(temperature=1.0, min_p=0.3),
    ):
        assert reference.kept(heat, row).tolist() == [True, True, True, True, False]


def test_rows_the_head_can_serve_are_left_to_it() -> None:
    stopping = Stopping(max_tokens=5)
    for temperature in (0.0, 0.7):
        sequence = make(replace(PLAIN, temperature=temperature), stopping, [1], [])
        assert sampled.sampled_row(sequence) is None
    greedy = replace(PLAIN, temperature=0.0, top_k=5, top_p=0.5, min_p=0.1)
    assert sampled.sampled_row(make(greedy, stopping, [1], [])) is None
    state = allocate(2, 10, CPU)
    state.rows.fill_(7)
    sampled.place(state, 1, make(PLAIN, stopping, [1], []))
    assert state.rows[1].tolist() == [0] * 16
    assert state.rows[0].tolist() == [7] * 16
    assert state.heat.tolist() == [0, 1]
    sampled.place(state, 1, make(replace(PLAIN, top_k=2), stopping, [1], []))
    assert state.heat.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({"top_k": 3}, 1 | 8),
        ({"top_p": 0.9}, 1 | 8),
        ({"min_p": 0.1}, 1),
        ({"logit_bias": ((3, 1.0),), "temperature": 0.0}, 1 | 2),
        ({"presence_penalty": 0.5, "temperature": 0.0, "top_k": 3}, 1 | 4),
        ({"repetition_penalty": 1.2, "top_p": 0.5}, 1 | 4 | 8),
    ],
)
def test_a_row_is_packed_as_the_kernels_read_it(changes: dict[str, Any], needs: int) -> None:
    params = replace(PLAIN, seed=(1 << 64) - 5, **changes)
    row = sampled.sampled_row(make(params, Stopping(max_tokens=5), [1, 2], [3]))
    assert row is not None
    state = allocate(3, 10, CPU)
    state.place(1, row)
    words = struct.unpack("<iifffffidq", state.rows[1].numpy().tobytes()[:48])
    assert words[:2] == (needs, params.top_k)
    assert words[2] == pytest.approx(params.temperature)
    assert words[4:7] == pytest.approx((params.repetition_penalty, params.presence_penalty, params.frequency_penalty))
    assert words[7:] == (2, params.top_p, seed_key(params.seed))
    assert not state.rows[[0, 2]].any()


def test_marks_and_biases_are_the_new_owners_alone() -> None:
    state = allocate(2, 8, CPU)
    state.marks.fill_(-1)
    state.bias.fill_(9)
    state.set_marks(0, [1, 1, 2], [2, 3, 3], [3, 7])
    state.set_bias(0, [(4, 2.5), (0, -1.0)])
    assert (state.marks[0] & COUNT).tolist() == [0, 0, 1, 2, 0, 0, 0, 0]
    assert ((state.marks[0] & SEEN) != 0).tolist() == [False, True, True, True, False, False, False, False]
    assert ((state.marks[0] & BARRED) != 0).tolist() == [False, False, False, True, False, False, False, True]
    assert state.bias[0].tolist() == [-1, 0, 0, 0, 2.5, 0, 0, 0]
    assert state.marks[1].tolist() == [-1] * 8
    assert state.bias[1].tolist() == [9] * 8


def test_fewer_rows_share_the_memory() -> None:
    state = allocate(8, 50, CPU)
    part = state.first(2)
    part.bias[1, 3] = 5
    assert float(state.bias[1, 3]) == 5
    for whole, less in ((state.rows, part.rows), (state.marks, part.marks), (state.candidates, part.candidates)):
        assert less.is_contiguous()
        assert less.data_ptr() == whole.data_ptr()
        assert less.shape[0] == 2


def test_stages_in_order(recorder: Any) -> None:
    vocabulary = 9000
    state = allocate(3, vocabulary, CPU)
    choice = Choice(torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    places = RowPages(torch.zeros(3, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32))
    chain = sampling(recorder, state, choice, places)
    assert [launch.kernel.name for launch in chain] == ["adjust", "bins", "sift", "draw"]
    assert [launch.shape.grid for launch in chain] == [(blocks(vocabulary), 3, 1)] * 3 + [(3, 1, 1)]
    assert state.parts.shape[1] == blocks(vocabulary) == 5
    assert {launch.values["best"] for launch in chain if "best" in launch.values} == {choice.best.data_ptr()}


def test_a_step_with_and_without(
    recorder: Any, model: Callable[[str], StepWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **options: zeros(*size, **options))
    weights = model("bf16")
    buffers = allocate_step(weights, 2, 4, 8)
    state: Sampling = allocate(2, weights.head.rows, CPU)
    plain = prepare_step(recorder, weights, buffers, ChainPlan(132))
    chain = prepare_step(recorder, weights, buffers, ChainPlan(132), state)
    names = [launch.kernel.name for launch in chain]
    assert names == [*[one.kernel.name for one in plain[:-1]], "adjust", "bins", "sift", "draw", "advance"]
    head, advance = chain[-6].values, chain[-1].values
    assert head["logits"] == chain[-5].values["logits"] == state.logits.data_ptr()
    assert head["temperature"] == state.heat.data_ptr()
    assert plain[-2].values["logits"] == 0
    assert plain[-2].values["temperature"] == buffers.choice.temperature.data_ptr()
    assert head["best"] == chain[-2].values["best"] == advance["best"]
    alone = prepare_step(recorder, weights, buffers, ChainPlan(132, dependent=False), state)
    assert not any(launch.dependent for launch in alone)


def test_stages_are_needed_until_stop_tokens_are_free() -> None:
    request = make(replace(PLAIN, temperature=0.0), Stopping(max_tokens=9, min_tokens=3, stop_token_ids=(4,)), [1], [])
    assert [sampled.needed(request, made) for made in range(5)] == [True, True, True, False, False]
    assert not sampled.needed(make(PLAIN, Stopping(max_tokens=9, min_tokens=3), [1], []))


def test_a_choice_among_many_wants_one_slice() -> None:
    nothing = torch.zeros(3)
    for logits in (torch.zeros(50, 3).t().unsqueeze(0), torch.zeros(2, 3, 50)):
        with pytest.raises(ValueError, match="one slice"):
            batch_sampling.sample(None, nothing, ProductParts(logits), nothing, nothing)


def test_a_row_among_many_is_packed_with_its_tables() -> None:
    row = SampledRow(temperature=0.7, top_k=5, top_p=0.9, marked=True, biased=True, repetition=1.2, noise_key=77)
    few = allocate(2, 50, CPU)
    few.place(1, row)
    addresses = (0x7F12_3456_789A_BCDE, 0xFFFF_0000_1111_2222)
    many = row.packed(*addresses)
    assert many[:48] == few.rows[1].numpy().tobytes()[:48]
    assert struct.unpack("<2Q", many[48:]) == addresses


@pytest.mark.parametrize(
    ("row", "within"),
    [
        (SampledRow(temperature=0.8, top_k=50, top_p=0.9, min_p=0.1), True),
        (SampledRow(temperature=0.8, top_k=100), True),
        (SampledRow(temperature=0.8, top_k=101), False),
        (SampledRow(temperature=0.8, top_p=0.9), False),
        (SampledRow(temperature=0.0, top_k=50), False),
        (SampledRow(temperature=0.8, top_k=50, biased=True), False),
        (SampledRow(temperature=0.8, top_k=50, marked=True), False),
    ],
)
def test_rows_whose_likeliest_tokens_are_enough(row: SampledRow, within: bool) -> None:
    assert row.within_top(100) == within
