"""Verifying steps on a GPU: bit for bit what plain steps compute, one token after the other; acceptance and drafts
against their references."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from engine.kernels import reference, speculation, two_pass
from engine.kernels.attention import AttentionOp, Embedding, Heads, LayerAttention, RowPages, scratch
from engine.kernels.build import OVERLAP_CAPABILITY, KernelLibrary
from engine.kernels.exchange import KEY_WORDS, Channels
from engine.kernels.launch import Launcher
from engine.kernels.speculation import MORE, PARKED, Future, Verified
from engine.kernels.tokens import Choice, FirstNorm
from engine.model.layers.draft_steps import DRAFT_ROWS, DraftSteps, Draws
from engine.model.layers.few_rows import StepBuffers, StepWeights, allocate, first_norm, prepare_start, prepare_step
from engine.sampling.noise import seed_key
from tests.engine.kernels.kept import KEPT, as_kept
from tests.engine.kernels.side_by_side import channels, side_by_side
from tests.engine.kernels.test_gpu_attention import EPS, HEADS, Case
from tests.engine.kernels.test_gpu_step import MOST, PAGES, Model, capture, place_rows, plan, ring_of

pytestmark = pytest.mark.gpu

LAID = 8
CUDA = torch.device("cuda")


class SeveralPolicy:
    """One sequence whose next tokens are known, as rows of one launch or one launch after the other."""

    def __init__(self, heads: Heads, first: int, group: int, kept: torch.dtype) -> None:
        self.case = Case(heads, [first + group - 1], kept=kept)
        self.first, self.group = first, group
        self.qkv = torch.randn(group, heads.rows, device="cuda")
        for at in range(first, first + group):  # what earlier drafts left there
            page = self.case.places.pages[0, at // 16]
            self.case.pool[:, page, :, at % 16] = as_kept(torch.tensor(float("nan"), device="cuda"), kept)

    def run(
        self,
        library: KernelLibrary,
        launcher: Launcher,
        rows: range,
        pool: torch.Tensor,
        window: int | None,
        **how: int,
    ) -> torch.Tensor:
        case, heads, count = self.case, self.case.heads, len(rows)
        places = RowPages(
            torch.tensor([self.first + row for row in rows], dtype=torch.int32, device="cuda"), case.places.pages
        )
        op = AttentionOp(
            library,
            heads,
            places,
            Embedding(case.angles, EPS),
            scratch(heads, count, CUDA),
            how.get("at_once", 0),
            self.first + self.group,
            bulk=how.get("slots", 0) > 0,
            slots=how.get("slots", 0),
            group=count,
            resident=how.get("resident", 1),
        )
        layer = LayerAttention(pool[0], pool[1], *(case.gains or (None, None)), window)
        out = torch.full((count, heads.queries * heads.dim), float("nan"), device="cuda", dtype=torch.bfloat16)
        launcher.enqueue([op.prepare(layer, self.qkv[rows.start : rows.stop].contiguous(), out)])
        return out


@pytest.mark.parametrize("group", [2, 4, 8])
@pytest.mark.parametrize("heads", [HEADS[0], HEADS[2], HEADS[3], HEADS[-1]], ids=str)
@pytest.mark.parametrize("kept", KEPT)
def test_rows_of_one_sequence_are_rows_alone(
    library: KernelLibrary, launcher: Launcher, heads: Heads, group: int, kept: torch.dtype
) -> None:
    torch.manual_seed(group)
    here = torch.cuda.get_device_properties(0).multi_processor_count
    ways: list[dict[str, int]] = [{}, {"at_once": 1 << 20}, {"at_once": here, "resident": 2}]
    if torch.cuda.get_device_capability() >= OVERLAP_CAPABILITY:
        ways.append({"at_once": 1 << 20, "slots": 2})
    for first in (0, 1, 10, 15, 120, 127, 250, 1020, 2047, 2301, 5003):
        for window in (None, 100):
            both = SeveralPolicy(heads, first, group, kept)
            pool = both.case.pool.clone()
            alone = [both.run(library, launcher, range(row, row + 1), pool, window) for row in range(group)]
            for how in ways:
                fresh = both.case.pool.clone()
                found = both.run(library, launcher, range(group), fresh, window, **how)
                assert torch.equal(found, torch.cat(alone)), (first, window, how)
                assert torch.equal(fresh.view(torch.uint8), pool.view(torch.uint8)), (first, window, how)


def state_of(sequences: int, most: int = 64) -> Verified:
    return speculation.allocate(sequences, LAID, most, 64, CUDA)


def key_of(token: int | None) -> int:
    """As `head` leaves it: a score above an id's complement."""
    score = 0xFFFFFFFF if token is None else 0xBF800000
    key = score << 32 | (~(token or 0) & 0xFFFFFFFF)
    return key - (1 << 64) if key >= 1 << 63 else key


def copies(state: speculation.Verified) -> dict[str, torch.Tensor]:
    """Returns a state of what a verifying step changes."""
    ring = torch.zeros_like(state.ring, pin_memory=True)
    return {
        "newest": state.newest.clone(),
        "count": state.count.clone(),
        "history": state.history.clone(),
        "ring": ring,
    }


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_acceptance(library: KernelLibrary, launcher: Launcher, group: int, ranks: int) -> None:
    chance, sequences = random.Random(group), 64
    state = state_of(sequences)
    places = RowPages(torch.full((sequences * LAID,), -1, dtype=torch.int32, device="cuda"), state.token)
    best = torch.zeros(sequences * group, dtype=torch.int64)
    told, history = [], []
    positions, tokens = [[-1] * LAID for _ in range(sequences)], [[0] * LAID for _ in range(sequences)]
    newest, last, stops = [], [], []
    for at in range(sequences):
        place, live = chance.randrange(40), chance.choice((0, 1, 1, 2, 5, LAID, LAID, LAID))
        nobody = chance.random() < 0.1
        fed = [chance.randrange(3) for _ in range(live)]
        right = chance.randrange(live + 1)
        chosen: list[int | None] = [fed[i + 1] if i < right and i + 1 < live else 5 for i in range(group)]
        if chance.random() < 0.2:
            chosen[chance.randrange(group)] = None
        newest.append(-1 if nobody else place)
        last.append(place + chance.choice((1, 2, 4, 20)))
        stops.append([chance.choice((-1, 2, 9))] + [-1] * 7)
        positions[at][:live] = [place + i for i in range(live)] if not nobody else [-1] * live
        tokens[at][:live] = fed
        for i in range(group):
            best[at * group + i] = key_of(chosen[i])
        expected = reference.verified(fed, chosen[: min(live, group)], place, last[-1], tuple(stops[-1][:1]))
        told.append(None if nobody else (expected, max(min(live, group) - 1, 0), live == 0))
    places.position.copy_(torch.tensor(positions).view(-1))
    state.token.copy_(torch.tensor(tokens).view(-1))
    state.newest.copy_(torch.tensor(newest))
    state.last_position.copy_(torch.tensor(last))
    state.stops.copy_(torch.tensor(stops))
    state.count.fill_(7)
    states = [state, *(replace(state, **copies(state)) for _ in range(1, ranks))]
    # Each rank has the best of some rows, and nothing of the others.
    owner = torch.randint(ranks, best.shape)
    choices = [Choice(torch.zeros(1), torch.zeros(1), (best * (owner == rank)).cuda()) for rank in range(ranks)]
    between: list[Channels | None] = [*channels(ranks, sequences, KEY_WORDS * group)] if ranks > 1 else [None]
    launches = [
        [speculation.accept(library, choice, own, places, group, to)]
        for choice, own, to in zip(choices, states, between, strict=True)
    ]
    side_by_side(launcher, launches, [torch.cuda.Stream() for _ in range(ranks)])
    assert not any(choice.best.any() for choice in choices)
    for other in states[1:]:
        for name in ("newest", "count", "history", "ring"):
            assert torch.equal(getattr(other, name), getattr(state, name))
    after, count, history = state.newest.tolist(), state.count.tolist(), state.history.tolist()
    for at, one in enumerate(told):
        ring = state.ring[at].tolist()
        if one is None:
            assert (after[at], count[at]) == (-1, 7)
            continue
        expected, proposed, parked = one
        if parked:
            assert (ring[7], after[at], count[at]) == (8 << 32 | PARKED << 24, newest[at], 8)
            continue
        entries = [
            (8 + i) << 32 | (flags if i + 1 == len(expected) else MORE) << 24 | (token or 0)
            for i, (token, flags) in enumerate(expected)
        ]
        entries[-1] |= proposed << 28
        assert ring[7 : 7 + len(entries)] == entries
        assert count[at] == 7 + len(entries)
        assert after[at] == (-1 if expected[-1][1] else newest[at] + len(entries))
        ids = [token for token, _ in expected if token is not None]
        assert history[at][newest[at] + 1 : newest[at] + 1 + len(ids)] == ids


def test_drafts_by_lookup(library: KernelLibrary, launcher: Launcher) -> None:
    chance, most, sequences = random.Random(3), 9000, 48
    state = state_of(sequences, most)
    places = RowPages(torch.full((sequences * LAID,), -9, dtype=torch.int32, device="cuda"), state.token)
    table = torch.randn(50, 64, device="cuda").bfloat16()
    target = allocate(Model("bf16", 16).weights, sequences * LAID, 1, 1).stream
    target = replace(
        target,
        residual=torch.zeros(sequences * LAID, 64, device="cuda"),
        scaled=torch.zeros(sequences * LAID, 64, device="cuda", dtype=torch.bfloat16),
        squares=torch.zeros(sequences * LAID, 8, device="cuda"),
    )
    gain = torch.rand(64, device="cuda")
    expected = []
    for at in range(sequences):
        length = chance.choice((1, 2, 3, 4, 5, 30, 700, 5000, 8900))
        ids = [chance.randrange(chance.choice((1, 3, 50))) for _ in range(length)]
        if length > 20 and at % 2:
            ids[-6:] = ids[3:9]
        held, last, drafts = (
            length + chance.choice((-1, 0, 2, 50)),
            length + chance.choice((0, 3, 50)),
            chance.choice((0, 2, 7)),
        )
        state.history[at, :length] = torch.tensor(ids)
        for part, value in ((state.newest, length - 1), (state.held, held), (state.last_position, last)):
            part[at] = value
        state.most_drafts[at] = drafts
        rows = min(max(min(held, last) - (length - 1), 0), 1 + drafts)
        expected.append((length, [ids[-1], *reference.looked_up(ids, LAID - 1)][:rows]))
    state.newest[7] = -1
    expected[7] = (0, [])
    launcher.enqueue([speculation.lookup(library, state, places, FirstNorm(table, gain, target)).alone()])
    torch.cuda.synchronize()
    for at, (length, rows) in enumerate(expected):
        here = slice(at * LAID, at * LAID + LAID)
        positions = [length - 1 + i if i < len(rows) else -1 for i in range(LAID)]
        assert places.position[here].tolist() == positions, at
        assert state.token[here].tolist()[: len(rows)] == rows, at
        for i, token in enumerate(rows):
            values = table[token].float()
            assert torch.equal(target.residual[at * LAID + i], values)
            assert torch.equal(target.scaled[at * LAID + i], (values * gain).bfloat16())


class Rounds:
    """A sequence on the kernels alone: rounds of any group over the same state."""

    def __init__(
        self,
        library: KernelLibrary,
        model: Model,
        future: Future | None = None,
        drafter: StepWeights | None = None,
        *,
        dependent: bool = True,
    ) -> None:
        self.state = state_of(1, MOST * 16)
        room = allocate(model.weights, LAID, MOST, 1)
        self.room: StepBuffers = replace(room, places=RowPages(room.places.position, room.places.pages[:1]))
        first = first_norm(model.weights, room)
        draft = speculation.lookup(library, self.state, self.room.places, first)
        if future is not None:
            draft = speculation.replay(library, self.state, self.room.places, first, future)
        self.start = draft.alone()
        self.chains = {}
        guessing = None
        if drafter is not None:
            choice = self.room.choice
            draws = tuple(Draws(choice.noise_key[:rows], choice.temperature[:rows]) for rows in DRAFT_ROWS)
            guessing = DraftSteps(drafter, self.state, draws, self.room.places.pages)
        for group in (1, 2, 4, 8):
            buffers = self.room.first(group)
            ending = speculation.accept(library, buffers.choice, self.state, self.room.places, group), draft
            how = plan(group=group, two_pass=model.weights.coarse is not None, dependent=dependent)
            chain = prepare_step(library, model.weights, buffers, how, ending=ending)
            if guessing is not None:
                laid = guessing.drafted(library, self.room.places, first, group - 1)
                chain = (*guessing.launches(library, how, group - 1, laid), *chain)
            self.chains[group] = chain

    def begin(self, pages: torch.Tensor, heat: float, tokens: int) -> None:
        """From token 5 at position 0 on."""
        state = self.state
        self.room.places.pages.copy_(pages)
        self.room.choice.temperature.fill_(heat)
        self.room.choice.noise_key.fill_(seed_key(4))
        for part, value in ((state.newest, 0), (state.held, MOST * 16), (state.last_position, tokens)):
            part.fill_(value)
        state.most_drafts.fill_(7)
        state.history[0, 0] = 5


@pytest.mark.parametrize(("form", "heat"), [("bf16", 0.9), ("int4", 0.0), ("int8", 0.9)])
def test_rounds_are_plain_steps_bit_for_bit(library: KernelLibrary, launcher: Launcher, form: str, heat: float) -> None:
    """Tokens, keys and values: 600 tokens, whatever the drafts and however many of them are right."""
    torch.manual_seed(21)
    model, tokens = Model(form, 1200), 600
    how = plan().tiling("head", model.weights.head)
    if form == "bf16":
        model.weights = replace(model.weights, coarse=two_pass.coarse_copy(model.weights.head, how.warps))
    buffers = allocate(model.weights, 1, MOST, 1024)
    place_rows(buffers, [(5, 0)])
    buffers.choice.temperature.fill_(heat)
    buffers.choice.noise_key.fill_(seed_key(4))
    launcher.enqueue([prepare_start(library, model.weights, buffers)])
    graph = capture(launcher, library, model, buffers, plan(), 1)
    for _ in range(tokens):
        graph.replay()
    torch.cuda.synchronize()
    text, pool = [5] + [token for token, _ in ring_of(buffers, 0, tokens)], model.pool.clone()
    ids = torch.zeros(MOST * 16, dtype=torch.int32, device="cuda")
    ids[: len(text)] = torch.tensor(text, dtype=torch.int32)
    for future in (Future(ids, 1.0), Future(ids, 0.7), Future(ids, 0.0), None):
        model.pool.fill_(float("nan"))
        rounds = Rounds(library, model, future)
        state, chance = rounds.state, random.Random(5)
        rounds.begin(buffers.places.pages, heat, tokens)
        launcher.enqueue([rounds.start])
        launched = 0
        while int(state.newest[0]) >= 0:
            launcher.enqueue(rounds.chains[chance.choice((1, 2, 4, 8))])
            torch.cuda.synchronize()
            launched += 1
            assert launched <= tokens
        assert state.history[0, : tokens + 1].tolist() == text
        if future is not None and future.chance == 1.0:
            assert launched < tokens / 2
        # The last token of a text is fed to nobody.
        for at in range(tokens):
            page = int(buffers.places.pages[0, at // 16])
            assert torch.equal(model.pool[:, :, page, :, at % 16], pool[:, :, page, :, at % 16]), at


def with_pages_of_its_own(weights: StepWeights) -> StepWeights:
    """The same model, whose keys and values are nowhere yet."""
    layers = []
    for layer in weights.layers:
        keys, values = (torch.full_like(each, float("nan")) for each in (layer.attention.keys, layer.attention.values))
        layers.append(replace(layer, attention=replace(layer.attention, keys=keys, values=values)))
    return replace(weights, layers=layers)


@pytest.mark.parametrize(("dependent", "by_page"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("heat", [0.0, 0.9])
def test_a_draft_model_that_is_the_target_is_always_right(
    library: KernelLibrary, launcher: Launcher, heat: float, dependent: bool, by_page: bool
) -> None:
    """Which it only is where it has computed each token once it is asked for the next; and one that is another model
    changes nothing. `by_page`: pages come one by one, so that rounds are cut where they end, to one row even."""
    torch.manual_seed(22)
    model, other, tokens = Model("bf16", 1200), Model("int4", 1200), 400
    buffers = allocate(model.weights, 1, MOST, 1024)
    place_rows(buffers, [(5, 0)])
    buffers.choice.temperature.fill_(heat)
    buffers.choice.noise_key.fill_(seed_key(4))
    launcher.enqueue([prepare_start(library, model.weights, buffers)])
    chain = prepare_step(library, model.weights, buffers, plan())
    for _ in range(tokens):
        launcher.enqueue(chain)
    torch.cuda.synchronize()
    text = [5] + [token for token, _ in ring_of(buffers, 0, tokens)]
    for drafter in (model.weights, other.weights):
        model.pool.fill_(float("nan"))
        own = with_pages_of_its_own(drafter)
        rounds, chance = Rounds(library, model, None, own, dependent=dependent), random.Random(5)
        rounds.begin(buffers.places.pages, heat, tokens)
        stands = 0
        while stands >= 0:
            group, held = chance.choice((2, 4, 8)), (stands // 16 + 1) * 16 if by_page else MOST * 16
            rounds.state.held.fill_(held)
            launcher.enqueue(rounds.chains[group])
            torch.cuda.synchronize()
            before, stands = stands, int(rounds.state.newest[0])
            assert stands < 0 or before < stands <= before + group
            if drafter is model.weights and stands >= 0 and before > 0:
                assert stands == min(before + group, tokens, held), (before, group)
        assert rounds.state.history[0, : tokens + 1].tolist() == text
        if drafter is model.weights:
            for ours, theirs in zip(own.layers, model.weights.layers, strict=True):
                for place in range(tokens - 8):
                    page, slot = int(buffers.places.pages[0, place // 16]), place % 16
                    for a, b in (
                        (ours.attention.keys, theirs.attention.keys),
                        (ours.attention.values, theirs.attention.values),
                    ):
                        assert torch.equal(a[page, :, slot], b[page, :, slot]), place


def test_a_draft_model_keeps_to_pages_limits_and_its_last_number(library: KernelLibrary, launcher: Launcher) -> None:
    """Rows that may not be drafted are not laid out, and what is no number ends the draft."""
    torch.manual_seed(23)
    model = Model("bf16", 1200)
    own = with_pages_of_its_own(model.weights)
    rounds = Rounds(library, model, None, own)
    pages = torch.randperm(PAGES, device="cuda")[:MOST].view(1, -1)
    for held, last, most, rows in ((64, 200, 7, 8), (36, 200, 7, 4), (200, 35, 7, 3), (64, 200, 2, 3), (33, 200, 7, 1)):
        rounds.begin(pages, 0.0, last)
        rounds.state.history[0, :33] = torch.randint(1, 900, (33,))
        for part, value in ((rounds.state.newest, 32), (rounds.state.held, held), (rounds.state.most_drafts, most)):
            part.fill_(value)
        for layer in own.layers:
            layer.attention.keys.fill_(0.5), layer.attention.values.fill_(0.5)
        chain = rounds.chains[8]
        laid = next(at for at, one in enumerate(chain) if one.kernel.name == "drafted") + 1
        launcher.enqueue(chain[:laid])
        torch.cuda.synchronize()
        expected = [32 + i if i < rows else -1 for i in range(LAID)]
        assert rounds.room.places.position.tolist() == expected, (held, last, most)
    own.layers[0].attention.values.fill_(float("nan"))
    rounds.state.held.fill_(200)
    launcher.enqueue(chain[:laid])
    torch.cuda.synchronize()
    assert rounds.room.places.position.tolist() == [32] + 7 * [-1]
