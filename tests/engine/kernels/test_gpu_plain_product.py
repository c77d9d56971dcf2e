"""Products of few tokens with plain weights on a GPU, against float64: any number of tokens, every division, shapes
that end in the middle of a tile, gated and in slices."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from engine.kernels.build import KernelLibrary
from engine.kernels.launch import Launcher
from engine.kernels.plain_product import MOST_TOKENS, PEERS, TILES, Division, divide, division, plain_product

pytestmark = pytest.mark.gpu

ROUNDED = 2**-7  # of a number, results in bf16
NEAR_ZERO = 0.02  # where the sum's own rounding counts
BEYOND = 3  # tokens that there is memory for and that are not there


def check(
    library: KernelLibrary,
    launcher: Launcher,
    tokens: int,
    shape: tuple[int, int],
    how: Division,
    *,
    gated: bool = False,
) -> None:
    rows, columns = shape
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    weight = (torch.randn(rows, columns, device="cuda") * 2 / columns**0.5).bfloat16()
    width, kind = rows // 2 if gated else rows, torch.bfloat16 if how.slices == 1 else torch.float32
    room = torch.full((how.slices * tokens + BEYOND, width), float("nan"), device="cuda", dtype=kind)
    out = room[: how.slices * tokens].view(how.slices, tokens, width)
    launcher.enqueue([plain_product(library, x, weight, out, how, gated=gated).alone()])
    expected = x.double() @ weight.double().T
    if gated:
        gate, up = expected.split(width, dim=1)
        expected = functional.silu(gate) * up
    error = (out.double().sum(0) - expected).abs() / (expected.abs() + NEAR_ZERO)
    assert float(error.nan_to_num(nan=float("inf")).max()) < ROUNDED, (tokens, how)
    assert bool(room[how.slices * tokens :].isnan().all())


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [(4096, 1024), (1024, 3072), (6144, 1024), (2048, 2048), (1040, 64), (2000, 72), (208, 128), (16384, 2048)],
)
def test_any_number_of_tokens(library: KernelLibrary, launcher: Launcher, rows: int, columns: int, gated: bool) -> None:
    for tokens in (1, 9, 16, 63, 64, 65, 100, 128, 129, 200, MOST_TOKENS):
        how = divide(tokens, rows, columns, library.gpu, gated=gated)
        assert how is not None or tokens > 128  # of so few there is none that the GPU does not hold
        if how is not None:
            check(library, launcher, tokens, (rows, columns), how, gated=gated)


@pytest.mark.parametrize("peers", PEERS)
@pytest.mark.parametrize("tile", TILES)
def test_every_division(library: KernelLibrary, launcher: Launcher, tile: int, peers: int) -> None:
    """Also of many more blocks than the GPU holds at a time."""
    shape = 1232, 712
    for tokens in (40, 100, 130, 700):
        for slices in (1, 2, 3, 12):
            check(library, launcher, tokens, shape, division(tokens, shape[1], library.gpu, tile, peers, slices))
        how = division(tokens, shape[1], library.gpu, tile, peers, 1)
        check(library, launcher, tokens, shape, how, gated=True)


@pytest.mark.parametrize("slices", [1, 3])
def test_one_launch_after_another_in_a_graph(library: KernelLibrary, launcher: Launcher, slices: int) -> None:
    """Each reads what the one before wrote, as launches that may overlap; with slices, each the same."""
    width, tokens = 1024, 100
    x, y = torch.randn(2, tokens, width, device="cuda").bfloat16()
    parts = torch.empty(slices, tokens, width, device="cuda")
    weights = [(torch.randn(width, width, device="cuda") / width**0.5).bfloat16() for _ in range(6)]
    chain = []
    for index, weight in enumerate(weights):
        for tile in (16, 64):  # the second finds blocks of the first still there
            how = division(tokens, width, library.gpu, tile, 4, slices)
            source, target = (x, y) if index % 2 == 0 or slices > 1 else (y, x)
            chain.append(plain_product(library, source, weight, parts if slices > 1 else target, how))
    begun = x.clone()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        launcher.enqueue(chain)
        eager = parts.clone() if slices > 1 else x.clone()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        launcher.enqueue(chain)
        graph.capture_end()
        for _ in range(50):
            x.copy_(begun), y.fill_(float("nan")), parts.fill_(float("nan"))
            graph.replay()
            assert torch.equal(parts if slices > 1 else x, eager)
    expected = begun
    for weight in weights if slices == 1 else weights[-1:]:
        expected = (expected.float() @ weight.float().T).bfloat16()
    found = eager.sum(0) if slices > 1 else eager.float()
    assert float((found - expected.float()).norm() / expected.float().norm()) < 0.05
