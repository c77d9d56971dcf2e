"""Sampling against a plain reference written from the specification, in Python integers and float64."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.api import GREEDY, SamplingParams, Stopping
from engine.sampling.noise import gumbel, seed_key, signed
from engine.sampling.sampler import NARROW, Sampler
from engine.scheduling.sequence_state import SequenceState
from tests.properties import example_count

CPU = torch.device("cpu")
WORD = (1 << 64) - 1
NEUTRAL = replace(GREEDY, temperature=1.0)


# The reference


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def noise(seed: int, position: int, token: int) -> float:
    key = mix((seed + 0x9E3779B97F4A7C15) & WORD)
    bits = mix((key + position * 0x9E3779B97F4A7C15 + token * 0xD1B54A32D192ED03) & WORD)
    return -math.log(-math.log(((bits >> 40) + 0.5) / 2**24))


def adjusted(logits: list[float], sequence: SequenceState) -> list[float]:
    """After bias and penalties, stop tokens barred."""
    one, stopping = sequence.sampling, sequence.stopping
    found = list(logits)
    for token, value in one.logit_bias:
        found[token] += value
    factor = one.repetition_penalty
    for token in set(sequence.token_ids):
        found[token] = found[token] / factor if found[token] > 0 else found[token] * factor
    for token, count in Counter(sequence.token_ids[sequence.prompt_length :]).items():
        found[token] -= one.presence_penalty + one.frequency_penalty * count
    if sequence.output_length < stopping.min_tokens:
        for token in stopping.stop_token_ids:
            found[token] = -math.inf
    return found


def kept_weights(logits: list[float], sequence: SequenceState) -> dict[int, float]:
    """Token → log-weight after every filter; temperature 0 counts as 1."""
    one = sequence.sampling
    found = adjusted(logits, sequence)
    best = max(found)
    heat = [(value - best) / (one.temperature or 1.0) for value in found]
    ordered = sorted(heat, reverse=True)[: one.top_k or None]
    least = ordered[-1]
    if one.top_p < 1:
        sums = list(itertools.accumulate(math.exp(value) for value in ordered))
        least = next(value for value, total in zip(ordered, sums, strict=True) if total >= one.top_p * sums[-1])
    if one.min_p > 0:
        least = max(least, math.log(one.min_p))
    return {token: value for token, value in enumerate(heat) if value >= least and value > -math.inf}


def expected(logits: list[float], sequence: SequenceState) -> int:
    one = sequence.sampling
    kept = kept_weights(logits, sequence)
    if one.temperature == 0:
        return max(kept, key=lambda token: kept[token])
    position = len(sequence.token_ids)
    return max(kept, key=lambda token: kept[token] + noise(one.seed, position, token))


def make(
    params: SamplingParams,
    prompt: list[int],
    output: list[int] | None = None,
    *,
    slot: int = 0,
    stopping: Stopping | None = None,
    logprobs: int | None = None,
) -> SequenceState:
    return SequenceState(
        key=0,
        slot=slot,
        token_ids=prompt + (output or []),
        prompt_length=len(prompt),
        sampling=params,
        stopping=stopping or Stopping(max_tokens=1000),
        logprobs=logprobs,
    )


def draw(sequences: list[SequenceState], logits: torch.Tensor, sampler: Sampler | None = None) -> list[int]:
    sampler = sampler or Sampler(logits.shape[1], max(one.slot for one in sequences) + 1, CPU)
    return [found.token_ids[0] for found in sampler.sample(sequences, logits)]


# Noise


@given(seed=st.integers(0, WORD), position=st.integers(0, 1 << 20), token=st.integers(0, 1 << 18))
def test_noise_is_the_specified_function(seed: int, position: int, token: int) -> None:
    found = gumbel(torch.tensor([seed_key(seed)]), torch.tensor([position]), torch.tensor([[token]]))
    assert found.item() == pytest.approx(noise(seed, position, token), rel=1e-12, abs=1e-12)


def test_noise_is_finite_at_both_ends() -> None:
    # Positions whose 24 bits are all zeros or all ones, found by running the mix backwards.
    def unmix(z: int) -> int:
        z ^= (z >> 31) ^ (z >> 62)
        z = (z * pow(0x94D049BB133111EB, -1, 1 << 64)) & WORD
        z ^= (z >> 27) ^ (z >> 54)
        z = (z * pow(0xBF58476D1CE4E5B9, -1, 1 << 64)) & WORD
        return z ^ (z >> 30) ^ (z >> 60)

    for bits, value in ((0, -math.log(25 * math.log(2))), (WORD, 25 * math.log(2))):
        assert mix(unmix(bits)) == bits
        found = gumbel(torch.tensor([signed(unmix(bits))]), torch.tensor([0]), torch.tensor([[0]]))
        assert found.item() == pytest.approx(value, abs=1e-6)


# Each row against the reference

tokens = st.lists(st.integers(0, 39), min_size=1, max_size=12)
parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 127, 128, 129, 200, 100000]),
    top_p=st.sampled_from([1.0, 1.0, 0.0, 0.2, 0.9, 0.95, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, -0.6, 1.1]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.2, 0.8]),
    seed=st.integers(0, WORD),
    logit_bias=st.lists(
        st.tuples(st.integers(0, 39), st.floats(-9, 9, width=32)), max_size=3, unique_by=lambda pair: pair[0]
    ).map(tuple),
)
rows = st.builds(
    lambda params, prompt, output, least, stops: make(
        params, prompt, output, stopping=Stopping(max_tokens=99, min_tokens=least, stop_token_ids=tuple(stops))
    ),
    parameters,
    tokens,
    st.lists(st.integers(0, 39), max_size=12),
    st.sampled_from([0, 0, 3, 20]),
    st.lists(st.integers(0, 39), max_size=3),
)


@pytest.mark.product
@given(
    batch=st.lists(rows, min_size=1, max_size=6),
    vocab=st.sampled_from([40, NARROW, NARROW + 1, 400]),
    spread=st.sampled_from([0.1, 1.0, 6.0]),
    salt=st.integers(0, 1000),
)
@settings(max_examples=example_count(300), deadline=None)
def test_every_row_draws_what_the_reference_draws(
    batch: list[SequenceState], vocab: int, spread: float, salt: int
) -> None:
    for slot, sequence in enumerate(batch):
        sequence.slot = slot
    logits = torch.randn(len(batch), vocab, generator=torch.Generator().manual_seed(salt)) * spread
    found = draw(batch, logits)
    assert found == [expected(one, sequence) for one, sequence in zip(logits.tolist(), batch, strict=True)]


def test_top_p_of_more_candidates_than_are_looked_at_first() -> None:
    # min_p leaves out the last of those looked at, which says nothing of top_p's share of the rest.
    params = replace(NEUTRAL, temperature=0.3, top_k=NARROW + 1, top_p=0.2, min_p=0.3)
    logits = torch.randn(3, NARROW + 1, generator=torch.Generator().manual_seed(0)) * 0.1
    for row in range(3):
        for seed in range(50):
            sequence = make(replace(params, seed=seed), [0])
            assert draw([sequence], logits[row : row + 1]) == [expected(logits[row].tolist(), sequence)]


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_top_p_is_exact_over_a_whole_vocabulary(share: float) -> None:
    """Nearly flat, so that each token is 1/400 of the whole: the last that counts is drawn, and none behind it."""
    vocab, rows = 400, 3000
    logits = torch.linspace(0, -0.01, vocab)
    weights = logits.double().exp()
    count = int((weights.cumsum(0) < share * weights.sum()).sum()) + 1
    sampler = Sampler(vocab, rows, CPU)
    asked = [make(replace(NEUTRAL, top_p=share, seed=seed), [0], slot=seed) for seed in range(rows)]
    drawn = draw(asked, logits.expand(rows, vocab).clone(), sampler)
    assert max(drawn) == count - 1


def test_seeded_rows_repeat_in_every_company() -> None:
    chance = random.Random(5)
    vocab, slots = 500, 12
    generator = torch.Generator().manual_seed(3)
    mine = [
        make(replace(NEUTRAL, seed=9, **options), [1, 2, 3], [4, 4, 5])
        for options in (
            {"temperature": 0.8},
            {"temperature": 0.7, "top_p": 0.9},
            {"temperature": 1.3, "top_p": 0.995},
            {"top_k": 40, "min_p": 0.02, "repetition_penalty": 1.2},
            {"min_p": 0.001},
            {"top_k": 300, "top_p": 0.99, "frequency_penalty": 0.3},
        )
    ]
    logits = [torch.randn(vocab, generator=generator) * 2 for _ in mine]
    alone = [draw([one], two.unsqueeze(0))[0] for one, two in zip(mine, logits, strict=True)]
    for _ in range(120):
        chosen = chance.sample(range(len(mine)), chance.randint(1, 3))
        members = [(mine[at], logits[at], alone[at]) for at in chosen]
        for _ in range(chance.randint(0, 8)):
            other = replace(
                NEUTRAL,
                temperature=chance.choice([0.0, 0.5, 1.0]),
                top_k=chance.choice([0, 5, 200]),
                top_p=chance.choice([1.0, 0.3, 0.99]),
                presence_penalty=chance.choice([0.0, 1.0]),
                seed=chance.getrandbits(64),
            )
            members.append((make(other, [7]), torch.randn(vocab, generator=generator) * 2, -1))
        chance.shuffle(members)
        for slot, (sequence, _, _) in enumerate(members):
            sequence.slot = slot
        found = draw(
            [one for one, _, _ in members], torch.stack([two for _, two, _ in members]), Sampler(vocab, slots, CPU)
        )
        assert all(wanted in (-1, token) for token, (_, _, wanted) in zip(found, members, strict=True))


# What is drawn over many seeds and positions


def chi_square(observed: Counter[int], weights: dict[int, float], draws: int) -> float:
    """The statistic, less its mean, in units of its deviation."""
    total = sum(math.exp(value) for value in weights.values())
    assert set(observed) <= set(weights)
    statistic = 0.0
    for token, value in weights.items():
        wanted = draws * math.exp(value) / total
        statistic += (observed[token] - wanted) ** 2 / wanted
    freedom = len(weights) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.proof
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 10},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.4, "top_k": 15, "top_p": 0.9},
    ],
)
@pytest.mark.parametrize("vocab", [24, 200])
def test_draws_follow_the_distribution(options: dict[str, Any], vocab: int) -> None:
    draws = 3000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(11)) * 1.2
    sampler = Sampler(vocab, 1, CPU)
    sequences = [make(replace(NEUTRAL, seed=seed, **options), [0] * (1 + seed % 7)) for seed in range(draws)]
    found: Counter[int] = Counter()
    for first in range(0, draws, 1000):
        found.update(draw(sequences[first : first + 1000], logits.expand(1000, -1), sampler))
    assert abs(chi_square(found, kept_weights(logits.tolist(), sequences[0]), draws)) < 4


@pytest.mark.proof
def test_neighbouring_positions_and_seeds_are_independent() -> None:
    draws, vocab = 8000, 4
    flat = torch.zeros(draws, vocab)
    by_position = draw([make(replace(NEUTRAL, seed=1), [0] * (at + 1)) for at in range(draws)], flat)
    by_seed = draw([make(replace(NEUTRAL, seed=at), [0]) for at in range(draws)], flat)
    even = dict.fromkeys(range(vocab * vocab), 0.0)
    for found in (by_position, by_seed):
        pairs = Counter(a * vocab + b for a, b in zip(found[::2], found[1::2], strict=True))
        assert abs(chi_square(pairs, even, draws // 2)) < 4


# Edges


def test_ties_are_kept_whole() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, -1.0]])
    for options in ({"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}):
        rows = [make(replace(NEUTRAL, seed=seed, **options), [0], slot=seed) for seed in range(200)]
        assert set(draw(rows, logits.expand(200, -1))) == {0, 1, 2, 3}


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    assert draw([make(replace(NEUTRAL, temperature=0.0), [0])], logits) == [1]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_of_no_numbers_fails_alone(temperature: float, poison: float) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    params = replace(NEUTRAL, temperature=temperature)
    clean = draw([make(params, [0], slot=slot) for slot in range(3)], logits)
    logits[1, 17] = poison
    sequences = [make(params, [0], slot=slot, logprobs=2) for slot in range(3)]
    found = Sampler(50, 3, CPU).sample(sequences, logits)
    assert [one.token_ids for one in found] == [(clean[0],), (), (clean[2],)]
    assert [len(one.logprobs) for one in found] == [1, 0, 1]


def test_a_row_with_nothing_left_to_draw_fails() -> None:
    stopping = Stopping(max_tokens=9, min_tokens=5, stop_token_ids=(0, 1, 2))
    for temperature in (0.0, 1.0):
        sequence = make(replace(NEUTRAL, temperature=temperature), [0], stopping=stopping)
        assert Sampler(3, 1, CPU).sample([sequence], torch.zeros(1, 3))[0].token_ids == ()


def test_stop_tokens_wait_for_min_tokens() -> None:
    stopping = Stopping(max_tokens=9, min_tokens=2, stop_token_ids=(1,))
    logits = torch.tensor([[0.0, 50.0, 1.0]])
    for temperature in (0.0, 1.0):
        params = replace(NEUTRAL, temperature=temperature, logit_bias=((1, 50.0),))
        found = [draw([make(params, [0], [2] * made, stopping=stopping)], logits)[0] for made in range(4)]
        assert 1 not in found[:2]
        assert found[2:] == [1, 1]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.randn(2, 90, generator=torch.Generator().manual_seed(2)) * 3
    params = replace(NEUTRAL, temperature=0.2, top_k=3, logit_bias=((5, 4.0),), repetition_penalty=1.5)
    sequences = [make(params, [5], slot=0, logprobs=4), make(params, [5], slot=1, logprobs=0)]
    before = logits.clone()
    found = Sampler(90, 2, CPU).sample(sequences, logits)
    assert torch.equal(logits, before)
    exact = logits.double().log_softmax(-1)
    for at, one in enumerate(found):
        (told,) = one.logprobs
        assert told.logprob == pytest.approx(float(exact[at, one.token_ids[0]]), abs=1e-5)
    order = exact[0].argsort(descending=True)[:4].tolist()
    assert [token for token, _ in found[0].logprobs[0].top] == order
    assert [value for _, value in found[0].logprobs[0].top] == pytest.approx(exact[0, order].tolist(), abs=1e-5)
    assert found[1].logprobs[0].top == ()


@pytest.mark.parametrize(
    ("changes", "logits", "best"),
    [
        ({"repetition_penalty": 2.0}, [1.5, 1.8, 1.0, 0.0], 2),  # 1.5 and 1.8 count half
        ({"repetition_penalty": 2.0}, [-1.0, -1.2, -1.5, -9.0], 2),  # -1.0 and -1.2 count twice
        ({"repetition_penalty": 0.5}, [-2.0, -9.0, -1.5, -9.0], 0),
        ({"presence_penalty": 1.0}, [2.0, 2.5, 1.0, 0.0], 0),  # what was asked is not what was said
        ({"presence_penalty": 1.0}, [2.0, 3.5, 1.0, 0.0], 1),  # once, however often
        ({"frequency_penalty": 1.0}, [1.0, 3.5, 1.0, 1.8], 3),  # twice
    ],
)
def test_each_penalty_by_hand(changes: dict[str, float], logits: list[float], best: int) -> None:
    """Token 0 was asked, token 1 was said twice."""
    params = replace(NEUTRAL, temperature=0.0, **changes)
    assert draw([make(params, [0], [1, 1])], torch.tensor([logits])) == [best]


def test_penalties_survive_a_move_to_another_slot() -> None:
    vocab = 60
    params = replace(NEUTRAL, temperature=0.9, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.4)
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(30, 1, vocab, generator=generator)
    runs = []
    for moves in (False, True):
        sampler = Sampler(vocab, 3, CPU)
        sequence, other = make(params, [1, 2, 2], slot=0), make(params, [3], slot=0)
        for step in range(30):
            if moves and step in (7, 20):  # preempted; another has the slot meanwhile; comes back elsewhere
                draw([other], logits[step], sampler)
                sequence = dataclasses.replace(sequence, slot=(sequence.slot + 1) % 3)
            sequence.token_ids += draw([sequence], logits[step], sampler)
            assert sequence.token_ids[-1] == expected(logits[step, 0].tolist(), _without_last(sequence))
        runs.append(sequence.token_ids)
    assert runs[0] == runs[1]


def _without_last(sequence: SequenceState) -> SequenceState:
    return dataclasses.replace(sequence, token_ids=sequence.token_ids[:-1])
