"""Decode attention of many rows on a GPU, against float64: head layouts, ragged lengths, padding, windows, and slots
past the contexts that hold NaN."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import batch_attention as ops
from engine.kernels import reference
from engine.kernels.attention import Heads, LayerAttention
from engine.kernels.build import KernelLibrary
from engine.kernels.gemm import ordered
from engine.kernels.gpu import gpu_shape
from engine.kernels.launch import Launcher
from engine.kernels.weights import Format
from tests.engine.kernels.kept import KEPT, as_kept, read

pytestmark = pytest.mark.gpu

NAN = float("nan")
HEADS = [
    Heads(16, 8, 128, True),
    Heads(32, 8, 128, False),
    Heads(14, 2, 64, False),
    Heads(8, 8, 64, True),
    Heads(20, 2, 128, False),  # ten query heads on one of keys: two items
    Heads(4, 1, 256, False),
]
LENGTHS = {
    "borders": [1, 15, 16, 17, 31, 32, 33, 0, 48, 49, 511, 512, 513],
    "even": [192] * 64,
    "ragged": [0, 3000, 1, 700, 0, 0, 64, 129, 2047, 5, 1024, 96] * 3,
    "one": [7000],
    "padding": [0] * 20,
    "many": [100 + 7 * (row % 131) for row in range(512)],
}


class Case:
    """Random rows over a shuffled pool whose unwritten slots are NaN."""

    def __init__(
        self,
        library: KernelLibrary,
        heads: Heads,
        lengths: list[int],
        window: int | None,
        kept: torch.dtype = torch.bfloat16,
    ) -> None:
        device, rows = torch.device("cuda"), len(lengths)
        self.heads, self.lengths = heads, lengths
        held = [-(-length // 16) for length in lengths]
        total, most = sum(held) + 5, max(*held, 1) + 2
        free = torch.randperm(total, device=device).to(torch.int32)
        pages = torch.full((rows, most), 2**30, dtype=torch.int32, device=device)  # past the held ones: nothing to read
        self.pool = as_kept(torch.full((2, total, heads.keys, 16, heads.dim), NAN, device=device), kept)
        at = 0
        for row, count in enumerate(held):
            own = pages[row, :count] = free[at : at + count]
            at += count
            fresh = torch.randn(2, count, heads.keys, 16, heads.dim, device=device).bfloat16()
            if lengths[row] % 16:
                fresh[:, -1, :, lengths[row] % 16 :] = NAN
            self.pool[:, own.long()] = as_kept(fresh, kept)
        self.rows = ops.BatchRows(torch.tensor(lengths, dtype=torch.int32, device=device), pages)
        self.queries = torch.randn(rows, heads.queries, heads.dim, device=device).bfloat16()
        shape = ops.grid(heads, gpu_shape(device))
        space = ops.workspace(heads, rows, shape, device)
        for poisoned in (space.out, space.sums):
            poisoned.fill_(NAN)
        self.ops = ops.BatchAttention(library, heads, self.rows, shape, space, window)

    def run(self, launcher: Launcher, times: int = 1) -> torch.Tensor:
        out = torch.full_like(self.queries, NAN)
        layer = LayerAttention(self.pool[0], self.pool[1], None, None, self.ops.window)
        launcher.enqueue([self.ops.plan(), *[self.ops.attend(layer, self.queries, out)] * times])
        torch.cuda.synchronize()
        return out


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention(
    library: KernelLibrary,
    launcher: Launcher,
    heads: Heads,
    lengths: list[int],
    window: int | None,
    kept: torch.dtype,
) -> None:
    case = Case(library, heads, lengths, window, kept)
    out = case.run(launcher)
    items = heads.keys * ops.subgroups(heads)
    each, entries, runs = reference.plan_rows(lengths, items, case.ops.grid.units, 4, window)
    space = case.ops.workspace
    assert int(space.each) == each
    assert space.entries[: len(entries)].tolist() == [list(entry) for entry in entries]
    assert space.runs.tolist() == [list(run) for run in runs]
    few = range(len(lengths)) if len(lengths) < 100 else range(0, len(lengths), 37)
    for row in few:
        if lengths[row] == 0:
            assert bool(out[row].isnan().all())
            continue
        pools = read(case.pool[0]), read(case.pool[1])
        only = slice(row, row + 1)
        expected = reference.attend_rows(
            case.queries[only].double(), pools, case.rows.pages[only], case.rows.lengths[only], window
        )
        distance = (out[row].double() - expected[0]).norm() / expected.norm()
        assert float(distance) < 6e-3, (row, lengths[row])
    live = case.rows.lengths > 0
    assert bool(out[live].isfinite().all())
    assert not space.arrivals.any()


@pytest.mark.parametrize("kept", KEPT)
def test_again_and_again_the_same_bits(library: KernelLibrary, launcher: Launcher, kept: torch.dtype) -> None:
    case = Case(library, HEADS[0], LENGTHS["ragged"], None, kept)
    first = case.run(launcher)
    for _ in range(20):
        assert torch.equal(case.run(launcher, times=3)[first.isfinite()], first[first.isfinite()])


@pytest.mark.parametrize("kept", KEPT)
def test_as_older_gpus_have_it(older_library: KernelLibrary, launcher: Launcher, kept: torch.dtype) -> None:
    """Launched one after the other, as they must be there."""
    case = Case(older_library, HEADS[1], LENGTHS["ragged"], None, kept)
    out = torch.full_like(case.queries, NAN)
    layer = LayerAttention(case.pool[0], case.pool[1], None, None)
    launcher.enqueue([case.ops.plan().alone(), case.ops.attend(layer, case.queries, out).alone()])
    torch.cuda.synchronize()
    live = case.rows.lengths > 0
    pools = read(case.pool[0]), read(case.pool[1])
    expected = reference.attend_rows(case.queries.double(), pools, case.rows.pages, case.rows.lengths, None)
    assert float((out[live].double() - expected[live]).norm() / expected[live].norm()) < 6e-3


def test_a_graph_follows_the_lengths(library: KernelLibrary, launcher: Launcher) -> None:
    """Captured once; rows come, go and grow between replays."""
    case = Case(library, HEADS[0], LENGTHS["ragged"], None)
    out = torch.full_like(case.queries, NAN)
    layer = LayerAttention(case.pool[0], case.pool[1], None, None)
    launches = [case.ops.plan(), case.ops.attend(layer, case.queries, out)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher.enqueue(launches)
    for step in range(4):
        lengths = [(length * (step + 1)) // 4 for length in case.lengths]
        case.rows.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        expected = reference.attend_rows(
            case.queries.double(), (case.pool[0], case.pool[1]), case.rows.pages, case.rows.lengths, None
        )
        live = case.rows.lengths > 0
        assert float((out[live].double() - expected[live]).norm() / expected[live].norm()) < 6e-3


@pytest.mark.parametrize("order", [Format.INT8, Format.INT4])
def test_columns_lie_as_the_reader_wants(library: KernelLibrary, launcher: Launcher, order: Format) -> None:
    case = Case(library, HEADS[0], [300, 17] * 8, None)
    layer = LayerAttention(case.pool[0], case.pool[1], None, None)
    plain, moved = (torch.full((16, 2048), NAN, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    launches = [case.ops.attend(layer, case.queries, plain), case.ops.attend(layer, case.queries, moved, order)]
    launcher.enqueue([case.ops.plan(), *launches])
    torch.cuda.synchronize()
    assert torch.equal(ordered(plain, order), moved)
    assert not torch.equal(plain, moved)
