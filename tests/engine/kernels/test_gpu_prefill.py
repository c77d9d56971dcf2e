"""The kernels between the products of a chunk, on a GPU, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.kernels import prefill as ops
from engine.kernels import reference
from engine.kernels.attention import Embedding, Heads, LayerAttention
from engine.kernels.build import KernelLibrary
from engine.kernels.gemm import ordered
from engine.kernels.gpu import gpu_shape
from engine.kernels.launch import Launch, Launcher
from engine.kernels.weights import Format
from tests.engine.kernels.kept import E4M3, KEPT, as_kept, read

pytestmark = pytest.mark.gpu

NAN = float("nan")
ROUNDED = 2**-8  # of a value in bf16, and a little of what went into it
LAYOUTS = [
    Heads(4, 2, 128, True),
    Heads(6, 2, 64, False),
    Heads(3, 3, 96, True),
    Heads(8, 1, 32, False),
    Heads(2, 1, 256, True),
]


def pages_of(end: int, total: int) -> torch.Tensor:
    """int32 [1, pages]: of one row that holds so many tokens, and past them nothing to read."""
    held = -(-end // 16)
    pages = torch.full((1, held + 3), 2**30, dtype=torch.int32, device="cuda")
    pages[0, :held] = torch.randperm(total, device="cuda")[:held]
    return pages


def chunk_of(count: int, start: int, total: int) -> ops.Chunks:
    """One chunk at the front of a pass."""
    table = torch.tensor([[0, count, start, 0]], dtype=torch.int32, device="cuda")
    return ops.Chunks(table, pages_of(start + count, total))


def run(launcher: Launcher, *launches: Launch) -> None:
    launcher.enqueue(launches)
    torch.cuda.synchronize()


def close(found: torch.Tensor, expected: torch.Tensor, slack: float = 1e-5) -> None:
    distance = (found.double() - expected).abs() - expected.abs() * ROUNDED
    assert float(distance.nan_to_num(nan=float("inf")).max()) <= slack * float(expected.abs().max())


@pytest.mark.parametrize("order", [Format.INT8, Format.INT4])
def test_columns_lie_as_the_reader_wants(library: KernelLibrary, launcher: Launcher, order: Format) -> None:
    """Each of the three that write activations, against its own plain result."""
    product = ops.ProductParts(torch.randn(16, 1024, device="cuda").bfloat16())
    layout = Heads(4, 2, 64, False)
    chunk = chunk_of(16, 0, 4)
    pool = torch.randn(2, 4, 2, 16, 64, device="cuda").bfloat16()
    queries = torch.randn(16, 4, 64, device="cuda").bfloat16()
    splits = ops.splits_of(layout, (16,), queries.device)
    gain = torch.rand(1024, device="cuda")
    found = []
    for one in (Format.BF16, order):
        x, inner, attended = (
            torch.full((16, width), NAN, device="cuda", dtype=torch.bfloat16) for width in (1024, 512, 256)
        )
        stream = ops.Stream(torch.zeros(16, 1024, device="cuda"), x, 1e-5, one)
        layer = LayerAttention(pool[0], pool[1], None, None)
        run(
            launcher,
            ops.add_norm(library, product, gain, stream).alone(),
            ops.gate(library, product, inner, one).alone(),
            ops.attend_chunks(library, layout, chunk, splits, layer, queries, attended, one).alone(),
        )
        found.append((x, inner, attended))
    for plain, moved in zip(*found, strict=True):
        assert torch.equal(ordered(plain, order), moved)
        assert not torch.equal(plain, moved)


def sliced(value: torch.Tensor, slices: int) -> ops.ProductParts:
    """float32 slices that sum to value, or bf16 where there are none."""
    if slices == 0:
        return ops.ProductParts(value.bfloat16())
    parts = torch.randn(slices, *value.shape, device="cuda")
    parts[-1] = value - parts[:-1].sum(0)
    return ops.ProductParts(parts, torch.randn(value.shape[-1], device="cuda"))


def whole(product: ops.ProductParts) -> torch.Tensor:
    if not product.split:
        return product.data.double()
    assert product.bias is not None
    return product.data.double().sum(0) + product.bias.double()


@pytest.mark.parametrize("hidden", [64, 1000, 1024, 4096])
@pytest.mark.parametrize("slices", [0, 1, 3])
def test_the_stream_is_embedded_moved_on_and_normed(
    library: KernelLibrary, launcher: Launcher, hidden: int, slices: int
) -> None:
    table = torch.randn(99, hidden, device="cuda").bfloat16()
    tokens = torch.full((16,), 2**30, dtype=torch.int32, device="cuda")
    tokens[:13] = torch.randint(0, 99, (13,), device="cuda")
    chunk = ops.Chunk(torch.tensor([13], dtype=torch.int32, device="cuda"), tokens)
    gain = torch.rand(hidden, device="cuda") + 0.5
    stream = ops.Stream(
        torch.full((16, hidden), NAN, device="cuda"),
        torch.full((16, hidden), NAN, device="cuda", dtype=torch.bfloat16),
        1e-5,
    )
    run(launcher, ops.embed(library, chunk, table, gain, stream, scale=3.3).alone())
    expected = (table[chunk.tokens[:13].long()].float() * 3.3).double()
    assert torch.equal(stream.residual[:13].double(), expected)
    close(stream.x[:13], reference.rms_norm(expected, gain.double(), 1e-5))
    assert bool(stream.residual.isfinite().all())

    product = sliced(torch.randn(16, hidden, device="cuda") * 3, slices)
    before = stream.residual.double()
    run(launcher, ops.add_norm(library, product, gain, stream).alone())
    expected = before + whole(product)
    torch.testing.assert_close(stream.residual.double(), expected, rtol=1e-5, atol=1e-5)
    close(stream.x, reference.rms_norm(expected, gain.double(), 1e-5), slack=1e-4)


@pytest.mark.parametrize(("hidden", "heads", "dim"), [(64, 2, 64), (1000, 3, 96), (4096, 32, 128)])
def test_the_last_token_of_each_chunk_is_kept(
    library: KernelLibrary, launcher: Launcher, hidden: int, heads: int, dim: int
) -> None:
    fed = ops.Carried(torch.randn(70, hidden, device="cuda"), torch.randn(70, heads, dim, device="cuda").bfloat16())
    kept = ops.Carried(
        torch.full((4, hidden), NAN, device="cuda"),
        torch.full((4, heads, dim), NAN, device="cuda", dtype=torch.bfloat16),
    )
    chunks = torch.tensor([[0, 33, 5, 0], [33, 1, 0, 3], [0, 0, 0, 0], [34, 36, 64, 4]], dtype=torch.int32)
    run(launcher, ops.keep_ends(library, chunks.cuda(), fed, kept).alone())
    for whole, found in ((fed.residual, kept.residual), (fed.queries, kept.queries)):
        assert torch.equal(found[[0, 1, 3]], whole[[32, 33, 69]])
        assert bool(found[2].isnan().all())


@pytest.mark.parametrize("half", [6, 512, 514, 4864])
@pytest.mark.parametrize("slices", [0, 1, 2])
def test_gate(library: KernelLibrary, launcher: Launcher, half: int, slices: int) -> None:
    product = sliced(torch.randn(19, 2 * half, device="cuda") * 4, slices)
    out = torch.full((19, half), NAN, device="cuda", dtype=torch.bfloat16)
    run(launcher, ops.gate(library, product, out).alone())
    gate, up = whole(product).chunk(2, -1)
    close(out, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: f"{one.queries}-{one.keys}-{one.dim}")
@pytest.mark.parametrize("slices", [0, 2])
@pytest.mark.parametrize("size", [32, 640])  # a warp has one head, or several
@pytest.mark.parametrize("kept", KEPT)
def test_heads(
    library: KernelLibrary, launcher: Launcher, layout: Heads, slices: int, size: int, kept: torch.dtype
) -> None:
    count, start = 21, 37
    pages = pages_of(start + count, 9)
    positions = torch.full((size,), -1, dtype=torch.int32, device="cuda")
    positions[:count] = torch.arange(start, start + count)
    places = ops.TokenPlaces(positions, pages, torch.zeros(size, dtype=torch.int32, device="cuda"))
    angles = torch.rand(64, 2, layout.dim, device="cuda") * 2 - 1
    gains = (torch.rand(layout.dim, device="cuda") + 0.5, torch.rand(layout.dim, device="cuda") * 96)
    pool = as_kept(torch.full((2, 9, layout.keys, 16, layout.dim), NAN, device="cuda"), kept)
    layer = LayerAttention(pool[0], pool[1], *(gains if layout.norm else (None, None)))
    product = sliced(torch.randn(size, layout.rows, device="cuda"), slices)
    queries = torch.full((size, layout.queries, layout.dim), NAN, device="cuda", dtype=torch.bfloat16)
    embedding = Embedding(angles, 1e-6)
    run(launcher, ops.row_heads(library, layout, layer, places, embedding, product, queries).alone())
    exact_gains = (gains[0].double(), gains[1].double()) if layout.norm else None
    rows = whole(product)
    written = torch.zeros(9, 16, dtype=torch.bool, device="cuda")
    for m in range(count):
        at = start + m
        found = reference.attention_row(rows[m], layout, exact_gains, angles[at].double(), 1e-6)
        page, slot = int(pages[0, at // 16]), at % 16
        written[page, slot] = True
        close(queries[m], found[0])
        for ours, expected in zip(read(pool[:, page, :, slot]), found[1:], strict=True):
            if kept == E4M3:
                distance = (ours.double() - expected.clamp(-448, 448)).abs()
                assert bool((distance <= expected.abs() * 2**-4 * 1.001 + 2**-10).all())
            else:
                close(ours, expected)
    assert bool(read(pool).transpose(2, 3)[:, ~written].isnan().all())  # nothing else was touched
    assert bool(queries[count:].isnan().all())


def filled(
    pages: torch.Tensor, layout: Heads, end: int, total: int, kept: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool whose unwritten slots are NaN, and keys and values [2, end, kv_heads, dim] that it holds in `pages`; in
    bfloat16, of what can be kept."""
    pool = torch.full((2, total, layout.keys, 16, layout.dim), NAN, device="cuda", dtype=torch.bfloat16)
    held = read(as_kept(torch.randn(2, end, layout.keys, layout.dim, device="cuda"), kept))
    at = torch.arange(end, device="cuda")
    pool[:, pages[at // 16].long(), :, at % 16] = held.transpose(0, 1)
    return pool, held


def attended(found: torch.Tensor, query: torch.Tensor, held: torch.Tensor, window: int | None) -> bool:
    """Whether a token's result [heads · dim] is what the oracle has; weights are in bf16."""
    expected = reference.attend(query.double(), held[0].double(), held[1].double(), window)
    return float((found.view(query.shape).double() - expected).norm() / expected.norm()) < 6e-3


@pytest.mark.parametrize("wide", [True, False], ids=["warpgroups", "warps"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: f"{one.queries}-{one.keys}-{one.dim}")
@pytest.mark.parametrize("window", [None, 9, 100, 700])
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize(
    ("count", "start", "size"),
    [
        (2, 0, 16),
        (128, 0, 128),
        (77, 0, 128),
        (33, 500, 64),
        (200, 61, 256),
        (5, 3000, 16),
        (100, 2100, 128),
        (600, 1000, 640),
        (3100, 50, 4096),
    ],
)
def test_attention(
    library: KernelLibrary,
    launcher: Launcher,
    layout: Heads,
    window: int | None,
    count: int,
    start: int,
    size: int,
    wide: bool,
    kept: torch.dtype,
) -> None:
    device = torch.device("cuda")
    gpu = replace(gpu_shape(device), warpgroups=wide and torch.cuda.get_device_capability() == (9, 0))
    chunk = chunk_of(count, start, 200)
    pool, held = filled(chunk.pages[0], layout, start + count, 200, kept)
    pool = as_kept(pool, kept)
    queries = (torch.randn(size, layout.queries, layout.dim, device="cuda") * 2).bfloat16()
    queries[count:] = NAN
    out = torch.full((size, layout.queries * layout.dim), NAN, device="cuda", dtype=torch.bfloat16)
    splits = ops.splits_of(layout, (size,), device, gpu=gpu)
    layer = LayerAttention(pool[0], pool[1], None, None, window)
    run(launcher, *[ops.attend_chunks(library, layout, chunk, splits, layer, queries, out).alone()] * 2)
    for m in {0, 1, 15, 16, 31, 63, 64, 127, 128, count // 2, count - 1} & set(range(count)):
        assert attended(out[m], queries[m], held[:, : start + m + 1], window), m
    assert bool(out[:count].isfinite().all())
    assert bool(out[count:].isnan().all())
    assert not splits.arrivals.any()


@pytest.mark.parametrize("wide", [True, False], ids=["warpgroups", "warps"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: f"{one.queries}-{one.keys}-{one.dim}")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("kept", KEPT)
def test_attention_of_many_chunks(
    library: KernelLibrary, launcher: Launcher, layout: Heads, window: int | None, wide: bool, kept: torch.dtype
) -> None:
    """Chunks of several sequences, some continued, with tokens between them that are somebody else's."""
    device = torch.device("cuda")
    gpu = replace(gpu_shape(device), warpgroups=wide and torch.cuda.get_device_capability() == (9, 0))
    told = [
        (20, 130, 0, 2),
        (0, 0, 0, 0),
        (150, 1, 2000, 0),
        (151, 64, 700, 3),
        (300, 200, 33, 1),
    ]  # 215 to 300: nobody's
    told += [(500 + 3 * n, 3, 5 * n, 4 + n) for n in range(36)]  # more chunks than a warp has lanes
    size, total = 640, 600
    order = torch.randperm(total, device=device).to(torch.int32)
    pages = torch.full((40, 160), 2**30, dtype=torch.int32, device=device)
    pool = torch.full((2, total, layout.keys, 16, layout.dim), NAN, device="cuda", dtype=torch.bfloat16)
    held, used = {}, 0
    for _, count, start, row in told:
        if count:
            need = -(-(start + count) // 16)
            pages[row, :need] = order[used : used + need]
            used += need
            own, held[row] = filled(pages[row], layout, start + count, total, kept)
            pool = torch.where(own.isnan(), pool, own)
    pool = as_kept(pool, kept)
    table = torch.tensor(told, dtype=torch.int32, device=device)
    queries = (torch.randn(size, layout.queries, layout.dim, device="cuda") * 2).bfloat16()
    out = torch.full((size, layout.queries * layout.dim), NAN, device="cuda", dtype=torch.bfloat16)
    splits = ops.splits_of(layout, (size,), device, chunks=len(told), gpu=gpu)
    layer = LayerAttention(pool[0], pool[1], None, None, window)
    chunks = ops.Chunks(table, pages)
    run(launcher, *[ops.attend_chunks(library, layout, chunks, splits, layer, queries, out).alone()] * 2)
    somebody = torch.zeros(size, dtype=torch.bool, device=device)
    for offset, count, start, row in told:
        somebody[offset : offset + count] = True
        for m in {0, 1, 63, 64, 127, 128, count - 1} & set(range(count)):
            assert attended(out[offset + m], queries[offset + m], held[row][:, : start + m + 1], window), (row, m)
    assert bool(out[somebody].isfinite().all())
    assert bool(out[~somebody].isnan().all())
    assert not splits.arrivals.any()
