"""The sampling stages against the float64 oracle, over random and adversarial logits, with poisoned scratch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from engine.kernels import reference, tokens
from engine.kernels.attention import RowPages
from engine.kernels.batch_sampling import Tables, fill, sample
from engine.kernels.build import KernelLibrary
from engine.kernels.launch import Launcher
from engine.kernels.prefill import ProductParts
from engine.kernels.rows import packed_words
from engine.kernels.sampling import (
    BARRED,
    COUNT,
    ROW_WORDS,
    SampledRow,
    Sampling,
    allocate,
    sampling,
    write_bias,
    write_marks,
)
from engine.kernels.tokens import Choice
from engine.sampling.noise import seed_key

pytestmark = pytest.mark.gpu
PLAIN = SampledRow(temperature=1.0)
# Sums of float32 and the kernel's logarithms in float32: how far a winner may be behind the oracle's.
NEAR = 2e-5


@dataclass
class Bed:
    """A batch of rows, and what the stages need around them."""

    state: Sampling
    choice: Choice
    places: RowPages

    @staticmethod
    def of(rows: list[SampledRow], vocabulary: int) -> Bed:
        batch, device = len(rows), torch.device("cuda")
        state = allocate(batch, vocabulary, device)
        # Scratch holds anything from the step before.
        state.parts.fill_(float("nan"))
        state.counts.fill_(1 << 40)
        state.masses.fill_(1 << 60)
        state.listed.fill_(77)
        state.arrived.fill_(5)
        state.cuts.fill_(3)
        state.adjusted.fill_(float("inf"))
        state.candidates.fill_(-1)
        for at, row in enumerate(rows):
            state.place(at, row)
        choice = Choice(
            torch.zeros(batch, device=device),
            torch.zeros(batch, dtype=torch.int64, device=device),
            torch.full((batch,), (3 << 62) - 3 - (1 << 64), dtype=torch.int64, device=device),
        )
        places = RowPages(
            torch.full((batch,), 20, dtype=torch.int32, device=device),
            torch.zeros(batch, 4, dtype=torch.int32, device=device),
        )
        return Bed(state, choice, places)

    def chosen(self) -> list[int | None]:
        """Token of each row, None for a score that is no number."""
        found: list[int | None] = []
        for key in self.choice.best.tolist():
            key %= 1 << 64
            finite = 0x00800000 <= key >> 32 <= 0xFF7FFFFF
            found.append(~key & 0xFFFFFFFF if finite else None)
        return found


def run(library: KernelLibrary, launcher: Launcher, bed: Bed, logits: torch.Tensor) -> list[int | None]:
    """By the four stages; and by the kernel of many rows, whose scores and marks must be the same to the last bit."""
    state, position = bed.state, bed.places.position
    state.logits.copy_(logits)
    marks, best, rows = state.marks.clone(), bed.choice.best.clone(), state.rows.clone()
    for at, addresses in enumerate(rows.view(torch.int64)[:, 6:]):
        addresses.copy_(torch.tensor([state.bias[at].data_ptr(), marks[at].data_ptr()]))
    launcher.enqueue([*sampling(library, state, bed.choice, bed.places)])
    launcher.enqueue([sample(library, rows, ProductParts(logits), position, best).alone()])
    torch.cuda.synchronize()
    assert best.tolist() == bed.choice.best.tolist()
    assert torch.equal(marks, state.marks)
    return bed.chosen()


def check(bed: Bed, rows: list[SampledRow], logits: torch.Tensor, found: list[int | None]) -> None:
    """Within what the filters keep, and the best of it or as good."""
    for at, row in enumerate(rows):
        position = int(bed.places.position[at]) + 1
        scores = reference.scores(logits[at], row, position, bed.state.bias[at], bed.state.marks[at])
        token = found[at]
        if scores is None:
            assert token is None, (at, row)
            continue
        assert token is not None, (at, row)
        behind = float(scores.max() - scores[token])
        assert behind <= (0 if row.temperature == 0 else NEAR), (at, row, token, int(scores.argmax()), behind)


def make_logits(kind: str, batch: int, vocabulary: int) -> torch.Tensor:
    noise = torch.randn(batch, vocabulary, device="cuda")
    match kind:
        case "smooth":
            return noise * 3
        case "model":  # a few likely tokens over a wide floor
            return noise * 2 - 8 + 18 * torch.rand(batch, vocabulary, device="cuda") ** 200
        case "ties":
            return noise.mul(2).round()
        case "flat":
            return torch.full_like(noise, -7.25)
        case "close":  # neighbours in float32
            return 5 + torch.randint(0, 3, noise.shape, device="cuda") * 2.0**-21
        case "one hot":
            return torch.full_like(noise, -30.0).index_fill_(1, torch.tensor([vocabulary - 1], device="cuda"), 30.0)
        case "wide":
            return noise * 1e4
    raise ValueError(kind)


FILTERS = [
    replace(PLAIN, top_k=50, top_p=0.95),
    replace(PLAIN, top_k=50),
    replace(PLAIN, top_k=1),
    replace(PLAIN, top_k=2, top_p=0.5, min_p=0.3),
    replace(PLAIN, top_p=0.9),
    replace(PLAIN, top_p=0.999, temperature=1.7),
    replace(PLAIN, top_p=0.0),
    replace(PLAIN, min_p=0.02),
    replace(PLAIN, min_p=1.0, top_k=9),
    replace(PLAIN, top_k=5000, top_p=0.9),
    replace(PLAIN, top_k=6000),
    replace(PLAIN, top_k=10**9, top_p=0.97),
    replace(PLAIN, temperature=1e-30, top_p=0.9),
    replace(PLAIN, temperature=1e-3, top_k=40),
    replace(PLAIN, temperature=100.0, top_k=300, top_p=0.7),
    replace(PLAIN, top_k=10**9),
    replace(PLAIN, temperature=0.0, presence=0.5, marked=True),
]


@pytest.mark.parametrize("kind", ["smooth", "model", "ties", "flat", "close", "one hot", "wide"])
@pytest.mark.parametrize("vocabulary", [40, 1003, 32000, 151936])
def test_filters(library: KernelLibrary, launcher: Launcher, kind: str, vocabulary: int) -> None:
    torch.manual_seed(vocabulary)
    for at in range(0, len(FILTERS), 8):
        rows = [replace(row, noise_key=seed_key(at + n)) for n, row in enumerate(FILTERS[at : at + 8])]
        bed = Bed.of(rows, vocabulary)
        for _ in range(3):
            logits = make_logits(kind, len(rows), vocabulary)
            found = run(library, launcher, bed, logits)
            bed.state.marks.zero_()  # as they were for the step
            check(bed, rows, logits, found)
            bed.places.position.add_(1)


def test_penalties_bias_and_barred_tokens(library: KernelLibrary, launcher: Launcher) -> None:
    """Marks go on by what is chosen; a barred token may stand from its position on and not before."""
    torch.manual_seed(1)
    vocabulary = 500
    rows = [
        replace(PLAIN, marked=True, repetition=1.3, presence=0.4, frequency=0.7, top_k=20, top_p=0.9),
        replace(PLAIN, marked=True, repetition=0.8, presence=-0.4, frequency=-0.1),
        replace(PLAIN, temperature=0.0, marked=True, repetition=1.4, frequency=0.3),
        replace(PLAIN, marked=True, free_from=26, top_p=0.8),
        replace(PLAIN, temperature=0.0, marked=True, free_from=27),
        replace(PLAIN, biased=True, top_k=3),
        replace(PLAIN, temperature=0.0, biased=True),
        replace(PLAIN, marked=True, biased=True, repetition=1.2, frequency=1.1, min_p=0.05, free_from=23),
    ]
    rows = [replace(row, noise_key=seed_key(n)) for n, row in enumerate(rows)]
    bed = Bed.of(rows, vocabulary)
    likely = torch.randperm(vocabulary)[:12].tolist()
    for at in range(len(rows)):
        bed.state.set_marks(at, likely[:5], likely[3:6] * 2, likely[6:9])
        bed.state.set_bias(at, [(likely[9], 3.5), (likely[0], -100.0)])
    met = 0
    for _ in range(12):
        logits = torch.randn(len(rows), vocabulary, device="cuda")
        logits[:, likely] += 4
        before = bed.state.marks.clone()
        found = run(library, launcher, bed, logits)
        after, bed.state.marks[:] = bed.state.marks.clone(), before
        check(bed, rows, logits, found)
        for at, (row, token) in enumerate(zip(rows, found, strict=True)):
            assert token is not None
            changed = (after[at] != before[at]).nonzero().flatten().tolist()
            assert changed == ([token] if row.marked else [])
            if row.marked:
                assert int(after[at, token] & COUNT) == int(before[at, token] & COUNT) + 1
                assert int(after[at, token]) < 0  # seen
                barred = bool(before[at, token] & BARRED)
                assert not (barred and int(bed.places.position[at]) + 1 < row.free_from)
                met += barred
        bed.state.marks[:] = after
        bed.places.position.add_(1)
    assert met, "no barred token came back"


def test_unsound_and_empty_rows_fail_alone(library: KernelLibrary, launcher: Launcher) -> None:
    torch.manual_seed(2)
    vocabulary = 5000
    for row, value in itertools.product(
        (replace(PLAIN, top_k=5), PLAIN, replace(PLAIN, temperature=0.0, marked=True)),
        (float("nan"), float("inf"), float("-inf")),
    ):
        rows = [row] * 3
        bed = Bed.of(rows, vocabulary)
        bed.state.set_marks(2, [], [], list(range(vocabulary)))
        bed.state.place(2, replace(row, marked=True, free_from=30))
        logits = torch.randn(3, vocabulary, device="cuda")
        logits[1, 4321] = value
        found = run(library, launcher, bed, logits)
        assert [token is None for token in found] == [False, True, True]
        check(bed, [*rows[:2], replace(row, marked=True, free_from=30)], logits, found)


def test_rows_left_to_the_head_and_idle_rows_stay_as_they_are(library: KernelLibrary, launcher: Launcher) -> None:
    rows = [replace(PLAIN, top_k=4, marked=True)] * 3
    bed = Bed.of(rows, 300)
    bed.state.leave(0, 0.5)
    bed.places.position[1] = -1
    before, marks = bed.choice.best.clone(), bed.state.marks.clone()
    logits = torch.randn(3, 300, device="cuda")
    run(library, launcher, bed, logits)
    assert bed.choice.best[:2].tolist() == before[:2].tolist()
    assert torch.equal(bed.state.marks[:2], marks[:2])
    assert bed.choice.best[2] != before[2]


def test_a_row_is_the_same_in_any_company(library: KernelLibrary, launcher: Launcher) -> None:
    torch.manual_seed(3)
    vocabulary = 32000
    rows = [replace(row, noise_key=seed_key(n)) for n, row in enumerate(FILTERS[:8])]
    logits = make_logits("model", 8, vocabulary)
    together = Bed.of(rows, vocabulary)
    run(library, launcher, together, logits)
    keys = together.choice.best.tolist()
    for _ in range(3):  # and in every run
        again = Bed.of(rows, vocabulary)
        run(library, launcher, again, logits)
        assert again.choice.best.tolist() == keys
    for at in range(8):
        alone = Bed.of(rows[at : at + 1], vocabulary)
        run(library, launcher, alone, logits[at : at + 1])
        assert alone.choice.best.tolist() == keys[at : at + 1]


def test_draws_follow_the_weights(library: KernelLibrary, launcher: Launcher) -> None:
    """Frequencies over many positions, within five deviations of what the filters leave."""
    torch.manual_seed(4)
    vocabulary, draws = 200, 4000
    row = replace(PLAIN, temperature=1.3, top_k=12, top_p=0.9, noise_key=seed_key(99))
    bed = Bed.of([row] * 8, vocabulary)
    logits = torch.randn(vocabulary, device="cuda") * 1.5
    bed.places.position.copy_(torch.arange(8) * draws)
    chain = sampling(library, bed.state, bed.choice, bed.places)
    seen = torch.zeros(vocabulary, dtype=torch.int64)
    for _ in range(draws // 8):
        bed.state.logits.copy_(logits.expand(8, -1))
        launcher.enqueue(chain)
        for token in bed.chosen():
            assert token is not None
            seen[token] += 1
        bed.places.position.add_(1)
    heat = (logits - logits.max()).cpu() / torch.tensor(row.heat)
    weights = heat.double().exp() * reference.kept(heat, row)
    wanted = weights / weights.sum() * draws
    assert ((seen - wanted).abs() <= 5 * wanted.clamp(min=1).sqrt()).all()
    assert not seen[wanted == 0].any()


def test_flags_of_a_step_know_no_token(library: KernelLibrary, launcher: Launcher) -> None:
    """What `advance` takes for no token is what an unsound row leaves."""
    bed = Bed.of([replace(PLAIN, top_k=4)], 300)
    run(library, launcher, bed, torch.full((1, 300), float("nan"), device="cuda"))
    assert bed.choice.best.tolist() == [0]
    assert tokens.NO_TOKEN == 4


def test_older_cards(older_library: KernelLibrary, library: KernelLibrary, launcher: Launcher) -> None:
    torch.manual_seed(5)
    rows = [replace(row, noise_key=seed_key(n)) for n, row in enumerate(FILTERS[:8])]
    logits = make_logits("smooth", 8, 5003)
    keys = []
    for kernels in (library, older_library):
        bed = Bed.of(rows, 5003)
        bed.state.logits.copy_(logits)
        launcher.enqueue(launch.alone() for launch in sampling(kernels, bed.state, bed.choice, bed.places))
        torch.cuda.synchronize()
        keys.append(bed.choice.best.tolist())
    assert keys[0] == keys[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_with_few_tables(library: KernelLibrary, launcher: Launcher, dtype: torch.dtype) -> None:
    """Rows of every kind side by side, most of which need no table; logits as the head leaves them."""
    torch.manual_seed(6)
    vocabulary, batch = 9001, 200
    rows = [replace(FILTERS[at % 16], noise_key=seed_key(at)) for at in range(batch)]
    rows[7] = replace(rows[7], marked=True, repetition=1.3)
    rows[150] = replace(PLAIN, biased=True, temperature=0.0)
    logits = make_logits("model", batch, vocabulary).to(dtype)
    device = logits.device
    marks = torch.full((vocabulary,), 77, dtype=torch.int32, device=device)
    bias = torch.full((vocabulary,), 7.0, device=device)
    tables = {
        7: Tables(bias=None, marks=marks, given=[5, 6], made=[6, 8, 8]),
        150: Tables(bias=bias, marks=None, biases=[(777, 100.0)]),
    }
    state = torch.zeros(batch, ROW_WORDS, dtype=torch.int32, device=device)
    for at, row in enumerate(rows):
        if at != 9:
            packed = row.packed(*(tables[at].addresses if at in tables else (0, 0)))
            state[at] = torch.frombuffer(bytearray(packed), dtype=torch.int32)
    told = torch.tensor(packed_words([one.words() for one in tables.values()]), dtype=torch.int32, device=device)
    launcher.enqueue([fill(library, vocabulary, told, 2)])
    before = marks.clone()
    position = torch.arange(20, 20 + batch, dtype=torch.int32, device=device)
    best = torch.full((batch,), 42, dtype=torch.int64, device=device)
    launcher.enqueue([sample(library, state, ProductParts(logits), position, best)])
    torch.cuda.synchronize()
    assert int(best[9]) == 42
    assert ~int(best[150]) & 0xFFFFFFFF == 777
    none = torch.zeros(vocabulary, device=device)
    for at, row in enumerate(rows):
        if at == 9:
            continue
        biases, counted = bias if row.biased else none, before if row.marked else none.int()
        scores = reference.scores(logits[at].float(), row, int(position[at]) + 1, biases, counted)
        assert scores is not None
        assert float(scores.max() - scores[~int(best[at]) & 0xFFFFFFFF]) <= NEAR, (at, row)


def test_tables_are_written_whole(library: KernelLibrary, launcher: Launcher) -> None:
    vocabulary, device = 9001, torch.device("cuda")
    given, made, barred = list(range(0, 9001, 7)) * 2, [8, 8, 8, 9000, 4095, 4096], [8, 3, 8999]
    biases = [(0, 1.5), (4096, -2.0), (9000, 0.25)]
    marks = [torch.full((vocabulary,), -1, dtype=torch.int32, device=device) for _ in range(2)]
    bias = [torch.full((vocabulary,), 9.0, device=device) for _ in range(2)]
    tables = [
        Tables(bias=bias[0], marks=marks[0], given=given, made=made, barred=barred, biases=biases),
        Tables(bias=bias[1], marks=None, biases=biases[:1]),
        Tables(bias=None, marks=marks[1], made=made),
    ]
    told = torch.tensor(packed_words([one.words() for one in tables]), dtype=torch.int32, device=device)
    launcher.enqueue([fill(library, vocabulary, told, len(tables))])
    torch.cuda.synchronize()
    wanted_marks = [torch.empty_like(marks[0]) for _ in range(2)]
    write_marks(wanted_marks[0], given, made, barred)
    write_marks(wanted_marks[1], [], made, [])
    wanted_bias = [torch.empty_like(bias[0]) for _ in range(2)]
    write_bias(wanted_bias[0], biases)
    write_bias(wanted_bias[1], biases[:1])
    assert all(map(torch.equal, [*marks, *bias], [*wanted_marks, *wanted_bias]))
