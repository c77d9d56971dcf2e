"""The product that gates its results on a GPU, against float64: any number of tokens, every tile, shapes that end in
the middle of one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from engine.kernels.build import KernelLibrary
from engine.kernels.gated_product import TILES, GatedDivision, division, gated_product
from engine.kernels.launch import Launcher

pytestmark = pytest.mark.gpu

ROUNDED = 2**-7  # of a number, results in bf16
NEAR_ZERO = 0.02  # where the sum's own rounding counts
BEYOND = 3  # tokens that there is memory for and that are not there


def check(library: KernelLibrary, launcher: Launcher, tokens: int, shape: tuple[int, int], tile: int | None) -> None:
    half, columns = shape
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    weight = (torch.randn(2 * half, columns, device="cuda") * 2 / columns**0.5).bfloat16()
    room = torch.full((tokens + BEYOND, half), float("nan"), device="cuda", dtype=torch.bfloat16)
    out = room[:tokens]
    how: GatedDivision | None = None if tile is None else division(tile, tokens, half, library.gpu)
    launcher.enqueue([gated_product(library, x, weight, out, how).alone()])
    gate, up = (x.double() @ weight.double().T).split(half, dim=1)
    expected = functional.silu(gate) * up
    error = (out.double() - expected).abs() / (expected.abs() + NEAR_ZERO)
    assert float(error.nan_to_num(nan=float("inf")).max()) < ROUNDED, (tokens, how)
    assert bool(room[tokens:].isnan().all())


@pytest.mark.parametrize(
    ("half", "columns"), [(3072, 1024), (14336, 4096), (520, 64), (1000, 72), (104, 128), (4864, 896)]
)
def test_any_number_of_tokens(library: KernelLibrary, launcher: Launcher, half: int, columns: int) -> None:
    for tokens in (1, 64, 127, 129, 256, 257, 300, 513, 1024, 2500):
        check(library, launcher, tokens, (half, columns), None)


@pytest.mark.parametrize("tile", TILES)
def test_every_tile(library: KernelLibrary, launcher: Launcher, tile: int) -> None:
    for tokens in (100, 700, 4200):
        check(library, launcher, tokens, (1208, 512), tile)


def test_extreme_gates_are_numbers(library: KernelLibrary, launcher: Launcher) -> None:
    half, columns, tokens = 128, 64, 256
    x = torch.ones(tokens, columns, device="cuda", dtype=torch.bfloat16)
    gates = torch.tensor([-1e4, -100.0, -1.0, 0.0, 1.0, 100.0, 1e4], device="cuda")
    weight = torch.ones(2 * half, columns, device="cuda", dtype=torch.bfloat16)
    weight[: len(gates)] = (gates / columns).bfloat16().unsqueeze(1)
    out = torch.full((tokens, half), float("nan"), device="cuda", dtype=torch.bfloat16)
    launcher.enqueue([gated_product(library, x, weight, out).alone()])
    expected = functional.silu(x.double() @ weight[:half].double().T) * columns
    assert torch.allclose(out.double(), expected, rtol=ROUNDED, atol=NEAR_ZERO)


def test_one_launch_after_another_in_a_graph(library: KernelLibrary, launcher: Launcher) -> None:
    """Each reads what the one before wrote, as launches that may overlap."""
    half, tokens = 256, 600
    first, second = torch.randn(2, tokens, half, device="cuda").bfloat16()
    weights = [(torch.randn(2 * half, half, device="cuda") / half**0.5).bfloat16() for _ in range(6)]
    x = first.clone()
    chain = []
    for index, weight in enumerate(weights):
        source, target = (first, second) if index % 2 == 0 else (second, first)
        chain.append(gated_product(library, source, weight, target))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        first.copy_(x)
        launcher.enqueue(chain)
        eager = first.clone()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        launcher.enqueue(chain)
        graph.capture_end()
        for _ in range(20):
            first.copy_(x), second.fill_(float("nan"))
            graph.replay()
            assert torch.equal(first, eager)
    for weight in weights:
        gate, up = (x.float() @ weight.float().T).split(half, dim=1)
        x = (functional.silu(gate) * up).bfloat16()
    assert float((eager.float() - x.float()).norm() / x.float().norm()) < 0.05
