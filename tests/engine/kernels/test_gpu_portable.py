"""The portable kernels on a GPU against float64: both dtypes, pages of both widths, norms of every kind, idle rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.kernels import batch_attention, reference
from engine.kernels import portable as ops
from engine.kernels.attention import Heads, LayerAttention
from engine.kernels.batch_attention import BatchRows
from engine.kernels.build import KernelLibrary
from engine.kernels.gpu import gpu_shape
from engine.kernels.launch import Launcher
from engine.kernels.portable import HeadPlaces, LayerKind, NormedStream

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
NAN = float("nan")
E4M3 = torch.float8_e4m3fn
DTYPES = [torch.bfloat16, torch.float16]
PLAIN = LayerKind(576, Heads(9, 3, 64, False), 1536, ops.NO_NORM, False, torch.bfloat16, 2)
KINDS = [
    PLAIN,
    replace(PLAIN, columns=1152, heads=Heads(4, 1, 256, True), inner=6912, norm=ops.OF_HEADS, gelu=True),
    replace(PLAIN, columns=4098, heads=Heads(6, 6, 96, True), inner=34, norm=ops.OF_ALL),
    replace(PLAIN, columns=64, heads=Heads(4, 2, 16, True), norm=ops.OF_HEADS),
]
LENGTHS = [1, 15, 16, 17, 0, 300, 129, 2047, 0, 64, 4100]
EPS = 1e-5


def near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    distance = (found.double() - expected.double()).norm() / expected.double().norm()
    assert float(distance) < (6e-3 if dtype == torch.bfloat16 else 1e-3), float(distance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("fresh_normed", "normed"), [(False, True), (True, True), (False, False)])
def test_join(
    library: KernelLibrary, launcher: Launcher, kind: LayerKind, dtype: torch.dtype, fresh_normed: bool, normed: bool
) -> None:
    kind, rows = replace(kind, dtype=dtype), 3
    residual, x = (
        torch.randn(rows, kind.columns, device=CUDA),
        torch.empty(rows, kind.columns, dtype=dtype, device=CUDA),
    )
    fresh = torch.randn(rows, kind.columns, device=CUDA).to(dtype)
    gains = torch.rand(2, kind.columns, device=CUDA) + 0.5
    gain, fresh_gain = gains[0] if normed else None, gains[1] if fresh_normed else None
    for added in (None, fresh):
        expected = reference.join(residual.double(), added, fresh_gain, gain, EPS)
        launcher.enqueue([ops.join(library, kind, NormedStream(residual, x, EPS), gain, added, fresh_gain)])
        torch.cuda.synchronize()
        torch.testing.assert_close(residual.double(), expected[0], rtol=1e-5, atol=1e-5)
        near(x, expected[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_gate(library: KernelLibrary, launcher: Launcher, kind: LayerKind, dtype: torch.dtype) -> None:
    kind = replace(kind, dtype=dtype)
    product = (torch.randn(5, 2 * kind.inner, device=CUDA) * 3).to(dtype)
    out = torch.full((5, kind.inner), NAN, dtype=dtype, device=CUDA)
    launcher.enqueue([ops.gate(library, kind, product, out)])
    torch.cuda.synchronize()
    near(out, reference.gate(product.double(), gelu=kind.gelu), dtype)


def pool_of(kind: LayerKind, pages: int) -> torch.Tensor:
    size = (2, pages, kind.heads.keys, 16, kind.heads.dim)
    if kind.kept == 1:
        return torch.full(size, 0x7F, dtype=torch.uint8, device=CUDA)  # NaN
    return torch.full(size, NAN, dtype=kind.dtype, device=CUDA)


def read(held: torch.Tensor) -> torch.Tensor:
    return held.view(E4M3).double() if held.dtype == torch.uint8 else held.double()


@pytest.mark.parametrize("kept", [2, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_heads(library: KernelLibrary, launcher: Launcher, kind: LayerKind, dtype: torch.dtype, kept: int) -> None:
    kind = replace(kind, dtype=dtype, kept=kept)
    layout, positions = kind.heads, [0, 15, -1, 16, 63, -1]
    pool = pool_of(kind, 40)
    qkv = torch.randn(len(positions), layout.rows, device=CUDA).to(dtype)
    count = layout.queries + layout.keys
    gains = None if kind.norm == ops.NO_NORM else torch.rand(count, layout.dim, device=CUDA) + 0.5
    angles = torch.randn(64, 2, layout.dim, device=CUDA)
    pages = torch.randperm(40, device=CUDA)[:24].to(torch.int32).view(6, 4)
    place = torch.tensor(positions, dtype=torch.int32, device=CUDA)
    queries = torch.full((len(positions), layout.queries, layout.dim), NAN, dtype=dtype, device=CUDA)
    layer = LayerAttention(pool[0], pool[1], None, None)
    launcher.enqueue([ops.heads(library, kind, layer, HeadPlaces(place, pages, angles, gains, EPS), qkv, queries)])
    torch.cuda.synchronize()
    written = torch.zeros(40, 16, dtype=torch.bool, device=CUDA)
    for row, position in enumerate(positions):
        if position < 0:
            assert bool(queries[row].isnan().all())
            continue
        expected = reference.turned_heads(
            qkv[row].double(), layout, gains, angles[position].double(), EPS, together=kind.norm == ops.OF_ALL
        )
        page = int(pages[row, position // 16])
        written[page, position % 16] = True
        near(queries[row], expected[0], dtype)
        for half, held in zip(pool, expected[1:], strict=True):
            found = read(half[page, :, position % 16])
            assert float((found - held).norm() / held.norm()) < (0.05 if kept == 1 else 6e-3)
    untouched = read(pool).transpose(2, 3)[:, ~written]
    assert bool(untouched.isnan().all())


@pytest.mark.parametrize("kept", [2, 1])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_attention(
    library: KernelLibrary, launcher: Launcher, kind: LayerKind, dtype: torch.dtype, window: int | None, kept: int
) -> None:
    """The plain kernel, and the one for many rows where it knows the heads: also in float16."""
    kind = replace(kind, dtype=dtype, kept=kept)
    layout, held = kind.heads, [-(-length // 16) for length in LENGTHS]
    pool = pool_of(kind, sum(held) + 3)
    pages = torch.full((len(LENGTHS), max(held)), 2**30, dtype=torch.int32, device=CUDA)
    free = torch.randperm(sum(held) + 3, device=CUDA).to(torch.int32)
    for row, count in enumerate(held):
        own, free = free[:count], free[count:]
        pages[row, :count] = own
        fresh = torch.randn(2, count, layout.keys, 16, layout.dim, device=CUDA)
        if LENGTHS[row] % 16:
            fresh[:, -1, :, LENGTHS[row] % 16 :] = NAN
        pool[:, own.long()] = fresh.to(E4M3).view(torch.uint8) if kept == 1 else fresh.to(dtype)
    rows = BatchRows(torch.tensor(LENGTHS, dtype=torch.int32, device=CUDA), pages)
    queries = torch.randn(len(LENGTHS), layout.queries, layout.dim, device=CUDA).to(dtype)
    layer = LayerAttention(pool[0], pool[1], None, None, window)
    expected = reference.attend_rows(queries.double(), (read(pool[0]), read(pool[1])), pages, rows.lengths, window)
    outs = [torch.full_like(queries, NAN) for _ in range(2)]
    launches = [ops.attend(library, kind, layer, rows, queries, outs[0])]
    if batch_attention.why_not(layout) is None:
        grid = batch_attention.grid(layout, gpu_shape(CUDA))
        space = batch_attention.workspace(layout, len(LENGTHS), grid, CUDA)
        own_ops = batch_attention.BatchAttention(library, layout, rows, grid, space, window)
        launches += [own_ops.plan(), own_ops.attend(layer, queries, outs[1])]
    launcher.enqueue([one.alone() for one in launches])
    torch.cuda.synchronize()
    live = rows.lengths > 0
    for out in outs[: 1 + (len(launches) > 1)]:
        near(out[live], expected[live], dtype)
        assert bool(out[~live].isnan().all())
