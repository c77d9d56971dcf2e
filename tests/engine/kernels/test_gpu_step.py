"""Whole steps in a CUDA graph, against a float64 model: tokens, logits, state, the host's ring."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from engine.kernels import reference, sampling, tokens
from engine.kernels.attention import Heads, LayerAttention
from engine.kernels.build import KernelLibrary
from engine.kernels.launch import Launcher, Trigger
from engine.kernels.sampling import SampledRow
from engine.kernels.weights import to_matrix
from engine.model.layers.few_rows import (
    ChainPlan,
    LayerWeights,
    StepBuffers,
    StepProduct,
    StepWeights,
    allocate,
    prepare_first,
    prepare_start,
    prepare_step,
)
from quant.checkpoint.forms import Dense, Int4Groups, Int8Rows

pytestmark = pytest.mark.gpu

HIDDEN, INNER, VOCABULARY, PAGES, MOST = 256, 512, 1000, 600, 70
HEADS = Heads(4, 2, 64, True)
LAYERS = 3


def random_matrix(form: str, rows: int, columns: int) -> tuple[StepProduct, torch.Tensor]:
    dense = torch.randn(rows, columns, device="cuda") * columns**-0.5
    if form == "bf16":
        return StepProduct(to_matrix(Dense(dense.bfloat16()))), dense.bfloat16().double()
    if form == "int8":
        scale = dense.abs().amax(1) / 127
        whole = Int8Rows((dense / scale[:, None]).round().to(torch.int8), scale)
        return StepProduct(to_matrix(whole)), whole.q.double() * scale.double()[:, None]
    grouped = dense.unflatten(1, (-1, 64))
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale4 = ((high - low) / 15).half()
    zero = (-low / scale4).round().clamp(0, 15)
    q = ((grouped / scale4[..., None]).round() + zero[..., None]).clamp(0, 15).to(torch.uint8).flatten(1)
    packed = q[:, ::2] | (q[:, 1::2] << 4)
    exact = (q.double().unflatten(1, (-1, 64)) - zero.double()[..., None]) * scale4.double()[..., None]
    return StepProduct(to_matrix(Int4Groups(packed, scale4, zero.to(torch.uint8), 64))), exact.flatten(1)


class Model:
    """A random model for the kernels, and the same in float64."""

    def __init__(self, form: str, positions: int, key_gain: float = 2.0) -> None:
        def gain(size: int, largest: float = 1.0) -> torch.Tensor:
            return torch.rand(size, device="cuda") * largest + 0.5

        self.pool = torch.zeros(LAYERS, 2, PAGES, HEADS.keys, 16, HEADS.dim, device="cuda", dtype=torch.bfloat16)
        self.exact: list[dict[str, torch.Tensor]] = []
        layers = []
        for index in range(LAYERS):
            shapes = {
                "qkv": (HEADS.rows, HIDDEN),
                "output": (HIDDEN, HEADS.queries * HEADS.dim),
                "gate_up": (2 * INNER, HIDDEN),
                "down": (HIDDEN, INNER),
            }
            made = {name: random_matrix(form, *shape) for name, shape in shapes.items()}
            bias = torch.randn(HEADS.rows, device="cuda") * 0.1
            gains = {
                "input": gain(HIDDEN),
                "mlp": gain(HIDDEN),
                "query": gain(HEADS.dim),
                "key": gain(HEADS.dim, key_gain),
            }
            layers.append(
                LayerWeights(
                    input_gain=gains["input"],
                    qkv=replace(made["qkv"][0], bias=bias),
                    attention=LayerAttention(
                        self.pool[index, 0],
                        self.pool[index, 1],
                        gains["query"],
                        gains["key"],
                        48 if index == 1 else None,
                    ),
                    output=made["output"][0],
                    mlp_gain=gains["mlp"],
                    gate_up=made["gate_up"][0],
                    down=made["down"][0],
                )
            )
            self.exact.append(
                {name: exact for name, (_, exact) in made.items()}
                | {name: value.double() for name, value in gains.items()}
                | {"bias": bias.double()}
            )
        table = torch.randn(VOCABULARY, HIDDEN, device="cuda").bfloat16()
        head, self.head = random_matrix("bf16", VOCABULARY, HIDDEN)
        angles = torch.outer(
            torch.arange(positions, device="cuda"), 10000.0 ** (-torch.arange(0, 1, 2 / HEADS.dim, device="cuda"))
        )
        cos, sin = angles.cos(), angles.sin()
        turn = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1).contiguous()
        self.weights = StepWeights(table, layers, gain(HIDDEN), head.matrix, HEADS, 1e-6, turn)

    def logits(self, token: int, position: int, pages: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        """float64, over a pool that holds the row's earlier keys and values; adds this token's."""
        weights = self.weights
        x = weights.table[token].double()
        for index, (layer, exact) in enumerate(zip(weights.layers, self.exact, strict=True)):
            qkv = reference.linear(x, exact["input"], weights.eps, exact["qkv"], exact["bias"])
            queries, key, value = reference.attention_row(
                qkv, HEADS, (exact["query"], exact["key"]), weights.angles[position].double(), weights.eps
            )
            page, slot = pages[position // 16].long(), position % 16
            pool[index, 0, page, :, slot], pool[index, 1, page, :, slot] = key, value
            keys, values = (reference.paged(pool[index, part], pages, position + 1) for part in (0, 1))
            found = reference.attend(queries, keys, values, layer.attention.window)
            x = reference.linear_residual(x, found.flatten(), exact["output"], None)
            inner = reference.gate_up(x, exact["mlp"], weights.eps, exact["gate_up"], None)
            x = reference.linear_residual(x, inner, exact["down"], None)
        return reference.linear(x, weights.final_gain.double(), weights.eps, self.head, None)


def bf16_logits(model: Model, token: int, position: int, pages: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    """As transformers computes in bf16: the residual and every result rounded, norms in float32."""
    weights = model.weights
    x = weights.table[token]

    def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + weights.eps)
        return gain.bfloat16() * wide.bfloat16()

    angles = weights.angles[position].bfloat16()
    for index, (layer, exact) in enumerate(zip(weights.layers, model.exact, strict=True)):
        qkv = functional.linear(norm(x, exact["input"]), exact["qkv"].bfloat16(), exact["bias"].bfloat16())
        queries, key, value = torch.split(qkv.view(-1, HEADS.dim), [HEADS.queries, HEADS.keys, HEADS.keys])
        queries = reference.rotate(norm(queries, exact["query"]), angles)
        page, slot = pages[position // 16].long(), position % 16
        pool[index, 0, page, :, slot] = reference.rotate(norm(key, exact["key"]), angles)
        pool[index, 1, page, :, slot] = value
        seen = min(layer.attention.window or position + 1, position + 1)
        keys, values = (reference.paged(pool[index, part], pages, position + 1)[-seen:] for part in (0, 1))
        found = functional.scaled_dot_product_attention(
            queries[None, :, None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], enable_gqa=True
        )
        x = x + functional.linear(found.flatten(), exact["output"].bfloat16())
        gate, up = functional.linear(norm(x, exact["mlp"]), exact["gate_up"].bfloat16()).chunk(2)
        x = x + functional.linear(functional.silu(gate) * up, exact["down"].bfloat16())
    return functional.linear(norm(x, weights.final_gain), model.head.bfloat16())


def test_no_worse_than_bf16(library: KernelLibrary, launcher: Launcher) -> None:
    """Teacher-forced divergence from float64, with key norms as large as published models have them."""
    torch.manual_seed(10)
    model = Model("bf16", 1200, key_gain=96.0)
    buffers = allocate(model.weights, 1, MOST, 8, logits=True)
    assert buffers.choice.logits is not None
    place_rows(buffers, [(0, 0)])
    pages = buffers.places.pages[0]
    chain = [prepare_start(library, model.weights, buffers), *prepare_step(library, model.weights, buffers, plan())]
    exact_pool, bf16_pool = torch.zeros_like(model.pool, dtype=torch.float64), torch.zeros_like(model.pool)
    ours: list[float] = []
    theirs: list[float] = []
    for position, token in enumerate(torch.randint(0, VOCABULARY, (300,)).tolist()):
        buffers.progress.token.fill_(token)
        buffers.places.position.fill_(position)
        launcher.enqueue(chain)
        wanted = model.logits(token, position, pages, exact_pool).log_softmax(-1)
        for found, kept in (
            (buffers.choice.logits[0], ours),
            (bf16_logits(model, token, position, pages, bf16_pool), theirs),
        ):
            kept.append(float((wanted.exp() * (wanted - found.double().log_softmax(-1))).sum()))
    mean, bound = sum(ours) / len(ours), sum(theirs) / len(theirs)
    assert mean < bound, f"mean divergence {mean:.2e}, of transformers' way {bound:.2e}"


def plan(**changes: object) -> ChainPlan:
    return ChainPlan(torch.cuda.get_device_properties(0).multi_processor_count, **changes)  # type: ignore[arg-type]


def place_rows(buffers: StepBuffers, first: list[tuple[int, int]]) -> None:
    """(token, position) of each row, over shuffled pages."""
    batch = buffers.batch
    buffers.places.pages.copy_(torch.randperm(PAGES, device="cuda")[: batch * MOST].view(batch, MOST))
    buffers.progress.token.copy_(torch.tensor([token for token, _ in first]))
    buffers.places.position.copy_(torch.tensor([position for _, position in first]))


def capture(launcher: Launcher, library: KernelLibrary, model: Model, buffers: StepBuffers, how: ChainPlan, steps: int):  # type: ignore[no-untyped-def]
    chain = prepare_step(library, model.weights, buffers, how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(steps):
            launcher.enqueue(chain)
    return graph


def ring_of(buffers: StepBuffers, row: int, count: int) -> list[tuple[int, int]]:
    """(token, flags) in order; every entry must carry its own count."""
    entries = buffers.progress.ring[row, :count].tolist()
    assert [entry >> 32 for entry in entries] == list(range(1, count + 1))
    return [(entry & 0xFFFFFF, entry >> 24 & 0xFF) for entry in entries]


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("batch", [1, 8])
def test_steps_agree_with_float64(library: KernelLibrary, launcher: Launcher, form: str, batch: int) -> None:
    """Forty steps from an empty context: each token's logits, given the tokens before it as the kernels chose them."""
    torch.manual_seed(5)
    model = Model(form, 1200)
    buffers = allocate(model.weights, batch, MOST, 64, logits=True)
    assert buffers.choice.logits is not None
    place_rows(buffers, [(11 * row + 1, 0) for row in range(batch)])
    launcher.enqueue([prepare_start(library, model.weights, buffers)])
    graph = capture(launcher, library, model, buffers, plan(), 1)
    exact_pool = torch.zeros_like(model.pool, dtype=torch.float64)
    fed = [11 * row + 1 for row in range(batch)]
    for step in range(40):
        graph.replay()
        torch.cuda.synchronize()
        for row in range(batch):
            wanted = model.logits(fed[row], step, buffers.places.pages[row], exact_pool)
            found = buffers.choice.logits[row].double()
            assert (found - wanted).norm() / wanted.norm() < 2e-2, (step, row)
            fed[row], flags = ring_of(buffers, row, step + 1)[-1]
            assert (fed[row], flags) == (int(found.argmax()), 0)
    assert buffers.places.position.tolist() == [40] * batch
    assert not buffers.choice.best.any()


@pytest.mark.parametrize(
    "changes",
    [{"trigger": Trigger.AFTER_WAIT}, {"trigger": Trigger.AT_END}, {"dependent": False}],
    ids=str,
)
def test_overlap_changes_nothing(library: KernelLibrary, launcher: Launcher, changes: dict[str, object]) -> None:
    """Bit for bit: however launches overlap, alone or in a graph of eight steps."""
    torch.manual_seed(6)
    model = Model("bf16", 1200)
    results = []
    pages = None
    for how, steps in ((plan(), 8), (plan(**changes), 8), (plan(**changes), 1)):
        model.pool.zero_()
        buffers = allocate(model.weights, 4, MOST, 256, logits=True)
        place_rows(buffers, [(row + 1, 0) for row in range(4)])
        pages = buffers.places.pages.clone() if pages is None else pages
        buffers.places.pages.copy_(pages)
        launcher.enqueue([prepare_start(library, model.weights, buffers)])
        graph = capture(launcher, library, model, buffers, how, steps)
        for _ in range(200 // steps):
            graph.replay()
        torch.cuda.synchronize()
        assert buffers.choice.logits is not None
        results.append((buffers.progress.ring.clone(), buffers.choice.logits.clone(), model.pool.clone()))
    for ring, logits, pool in results[1:]:
        assert torch.equal(ring, results[0][0])
        assert torch.equal(logits, results[0][1])
        assert torch.equal(pool.view(torch.int16), results[0][2].view(torch.int16))


def test_older_cards_do_the_same_step(library: KernelLibrary, older_library: KernelLibrary, launcher: Launcher) -> None:
    torch.manual_seed(11)
    model = Model("int4", 1200)
    results = []
    for kernels, how in ((library, plan()), (older_library, plan(dependent=False))):
        torch.manual_seed(12)
        model.pool.zero_()
        buffers = allocate(model.weights, 2, MOST, 64, logits=True)
        place_rows(buffers, [(1, 0), (2, 0)])
        launcher.enqueue([prepare_start(kernels, model.weights, buffers)])
        graph = capture(launcher, kernels, model, buffers, how, 4)
        for _ in range(8):
            graph.replay()
        torch.cuda.synchronize()
        assert buffers.choice.logits is not None
        results.append((buffers.progress.ring.clone(), buffers.choice.logits.clone()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_stops_limits_and_idle_rows(library: KernelLibrary, launcher: Launcher) -> None:
    torch.manual_seed(7)
    model = Model("bf16", 1200)

    def fresh(batch: int = 4) -> StepBuffers:
        model.pool.zero_()
        torch.manual_seed(8)
        buffers = allocate(model.weights, batch, MOST, 64)
        place_rows(buffers, [(row + 1, -1 if row == 3 else 0) for row in range(batch)])
        return buffers

    def run(buffers: StepBuffers) -> None:
        launcher.enqueue([prepare_start(library, model.weights, buffers)])
        graph = capture(launcher, library, model, buffers, plan(), 4)
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()

    free = fresh()
    run(free)
    said = [ring_of(free, row, 20) for row in range(3)]
    assert all(flags == 0 for row in said for _, flags in row)
    assert free.progress.count.tolist() == [20, 20, 20, 0]
    bound = fresh()
    tokens_of_0 = [token for token, _ in said[0]]
    stop = tokens_of_0[9]
    cut = tokens_of_0.index(stop) + 1
    bound.progress.stops[0, 5] = stop
    bound.progress.last_position[1] = 6
    run(bound)
    assert bound.progress.count.tolist() == [cut, 6, 20, 0]
    assert ring_of(bound, 0, cut) == [*said[0][: cut - 1], (stop, tokens.STOPPED)]
    assert ring_of(bound, 1, 6) == [*said[1][:5], (said[1][5][0], tokens.FULL)]
    assert ring_of(bound, 2, 20) == said[2]
    assert bound.places.position.tolist() == [-1, -1, 20, -1]


def test_long_run_over_the_split_border(library: KernelLibrary, launcher: Launcher) -> None:
    """Three rows walk across the borders where the context is split anew; their logits stay true to float64."""
    torch.manual_seed(9)
    model = Model("bf16", 1200)
    buffers = allocate(model.weights, 3, MOST, 1024, logits=True)
    assert buffers.choice.logits is not None
    starts = [100, 500, 990]
    place_rows(buffers, [(row + 1, start) for row, start in enumerate(starts)])
    for row, start in enumerate(starts):
        held = buffers.places.pages[row, : start // 16 + 1].long()
        model.pool[:, :, held] = torch.randn_like(model.pool[:, :, held])
    exact_pool = model.pool.double()
    launcher.enqueue([prepare_start(library, model.weights, buffers)])
    graph = capture(launcher, library, model, buffers, plan(), 1)
    fed = [1, 2, 3]
    for step in range(60):
        graph.replay()
        torch.cuda.synchronize()
        for row, start in enumerate(starts):
            wanted = model.logits(fed[row], start + step, buffers.places.pages[row], exact_pool)
            found = buffers.choice.logits[row].double()
            assert (found - wanted).norm() / wanted.norm() < 3e-2, (step, row)
            fed[row] = ring_of(buffers, row, step + 1)[-1][0]


def test_sampled_rows_among_plain_ones(library: KernelLibrary, launcher: Launcher) -> None:
    """Rows that sample draw by their own logits and history; the others say what they say without such company."""
    torch.manual_seed(13)
    model = Model("bf16", 1200)
    results = []
    for sampled in (False, True):
        model.pool.zero_()
        torch.manual_seed(14)
        buffers = allocate(model.weights, 4, MOST, 64)
        place_rows(buffers, [(row + 1, 0) for row in range(4)])
        buffers.choice.temperature[2] = 0.9
        buffers.choice.noise_key.copy_(torch.arange(4) * 977 + 5)
        state = sampling.allocate(4, VOCABULARY, torch.device("cuda"))
        filtered = SampledRow(temperature=0.8, top_k=20, top_p=0.9, noise_key=977 + 5)
        penalised = SampledRow(temperature=0.0, marked=True, presence=2.0, frequency=9.0)
        state.place(1, filtered)
        state.place(3, penalised)
        state.leave(2, 0.9)
        chain = prepare_step(library, model.weights, buffers, plan(), state if sampled else None)
        launcher.enqueue([prepare_start(library, model.weights, buffers)])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launcher.enqueue(chain)
        for step in range(40):
            graph.replay()
            torch.cuda.synchronize()
            if sampled:
                scores = reference.scores(
                    state.logits[1], filtered, step + 1, torch.zeros_like(state.bias[1]), state.marks[1]
                )
                token, _ = ring_of(buffers, 1, step + 1)[-1]
                assert scores is not None
                assert float(scores.max() - scores[token]) < 2e-5
                assert ring_of(buffers, 3, step + 1)[-1][0] == int(state.adjusted[3].argmax())
        results.append([ring_of(buffers, row, 40) for row in range(4)])
        if sampled:
            made = torch.tensor([token for token, _ in results[-1][3]], device="cuda")
            assert torch.equal(state.marks[3] & sampling.COUNT, torch.bincount(made, minlength=VOCABULARY).int())
    plain, mixed = results
    assert mixed[0] == plain[0]
    assert mixed[2] == plain[2]
    assert len({token for token, _ in mixed[3]}) > len({token for token, _ in plain[3]})


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("captured", [False, True])
def test_the_token_after_a_chunk(library: KernelLibrary, launcher: Launcher, form: str, captured: bool) -> None:
    """Against float64, for a chunk of any count; what lies behind the count may be anything."""
    torch.manual_seed(21)
    model = Model(form, 1200)
    weights = model.weights
    buffers = allocate(weights, 1, MOST, 16, logits=True)
    assert buffers.choice.logits is not None
    residual = torch.full((64, HIDDEN), float("nan"), device="cuda")
    place = torch.zeros(2, device="cuda", dtype=torch.int32)
    chain = prepare_first(library, weights, buffers, tokens.Fed(residual, place), plan())
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            launcher.enqueue(chain)
    for at, count in enumerate((1, 2, 37, 64)):
        residual[:count] = torch.randn(count, HIDDEN, device="cuda") * 3
        place[0] = count
        buffers.choice.temperature.fill_(0.7 * (at % 2))
        buffers.choice.noise_key.fill_(99 + at)
        buffers.places.position.fill_(200 + at)
        buffers.choice.logits.fill_(float("nan"))
        if captured:
            graph.replay()
        else:
            launcher.enqueue(chain)
        torch.cuda.synchronize()
        wanted = reference.linear(
            residual[count - 1].double(), weights.final_gain.double(), weights.eps, model.head, None
        )
        found = buffers.choice.logits[0]
        assert (found.double() - wanted).norm() / wanted.norm() < 1e-2
        row = SampledRow(temperature=0.7 * (at % 2), noise_key=99 + at)
        none = torch.zeros(VOCABULARY, device="cuda")
        scores = reference.scores(found, row, 201 + at, none, none.int())
        assert scores is not None
        token, flags = ring_of(buffers, 0, at + 1)[-1]
        assert float(scores.max() - scores[token]) < 2e-5
        assert flags == 0
        residual.fill_(float("nan"))


def test_a_chunk_without_numbers_has_no_token(library: KernelLibrary, launcher: Launcher) -> None:
    torch.manual_seed(22)
    model = Model("bf16", 1200)
    buffers = allocate(model.weights, 1, MOST, 16)
    residual = torch.full((4, HIDDEN), float("nan"), device="cuda")
    place = torch.tensor([4, 0], device="cuda", dtype=torch.int32)
    buffers.places.position.fill_(8)
    for state in (None, sampling.allocate(1, VOCABULARY, torch.device("cuda"))):
        if state is not None:
            state.place(0, SampledRow(temperature=1.0, top_k=5))
        buffers.places.position.fill_(8)
        launcher.enqueue(prepare_first(library, model.weights, buffers, tokens.Fed(residual, place), plan(), state))
        torch.cuda.synchronize()
        _, flags = ring_of(buffers, 0, int(buffers.progress.count[0]))[-1]
        assert flags == tokens.NO_TOKEN
