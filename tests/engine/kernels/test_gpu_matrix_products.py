"""The matrix kernels on a GPU, against float64, in every format and for every number of rows."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import linear as ops
from engine.kernels import reference, tiling, tokens
from engine.kernels.attention import RowPages
from engine.kernels.build import KernelLibrary
from engine.kernels.launch import Launcher
from engine.kernels.linear import Normed, ResidualUpdate
from engine.kernels.tokens import Choice
from engine.kernels.weights import Format, Matrix, to_matrix
from engine.sampling.noise import seed_key
from quant.checkpoint.forms import Dense, Int4Groups, Int8Rows

pytestmark = pytest.mark.gpu

EPS = 1e-6
SUMMED = 2e-5  # float32 sums against float64 of the same bf16 inputs
FORMATS = [(Format.BF16, 0), (Format.INT8, 0), (Format.INT4, 128), (Format.INT4, 64), (Format.INT4, 32)]
SHAPES = [(4096, 1024), (1024, 2048), (1024, 3072), (264, 256), (1040, 896), (4096, 14336), (4096, 7168)]
RAGGED = [
    (4096, 11008),
    (1024, 4864),
    (2560, 9728),
    (264, 2560),
    (10240, 8192),
]  # the last of their segments is shorter
SHAPES += RAGGED


def made(form: Format, group: int, rows: int, columns: int) -> tuple[Matrix, torch.Tensor]:
    """A random matrix for the kernels and the same in float64."""
    weight: Dense | Int4Groups | Int8Rows
    if form is Format.BF16:
        weight = Dense(torch.randn(rows, columns, device="cuda").bfloat16())
    elif form is Format.INT8:
        q = torch.randint(-128, 128, (rows, columns), device="cuda", dtype=torch.int8)
        weight = Int8Rows(q, torch.rand(rows, device="cuda") * 0.02 + 0.001)
    else:
        packed = torch.randint(0, 256, (rows, columns // 2), device="cuda", dtype=torch.uint8)
        scale = (torch.rand(rows, columns // group, device="cuda") * 0.02 + 0.001).half()
        zero = torch.randint(0, 16, (rows, columns // group), device="cuda", dtype=torch.uint8)
        weight = Int4Groups(packed, scale, zero, group)
    if isinstance(weight, Int4Groups):
        q = torch.stack((weight.packed & 15, weight.packed >> 4), -1).flatten(1).double()
        q -= weight.zero.repeat_interleave(group, 1)
        return to_matrix(weight), q * weight.scale.double().repeat_interleave(group, 1)
    if isinstance(weight, Int8Rows):
        return to_matrix(weight), weight.q.double() * weight.scale.double().unsqueeze(1)
    return to_matrix(weight), weight.weight.double()


def stream(batch: int, hidden: int) -> tuple[Normed, torch.Tensor]:
    """A residual with its gain applied, as the kernel before leaves it; rows of very different size."""
    residual = torch.randn(batch, hidden, device="cuda") * torch.logspace(-2, 2, batch, device="cuda").unsqueeze(1)
    gain = torch.rand(hidden, device="cuda") + 0.5
    squares = residual.square().view(batch, -1, 8).sum(-1)
    return Normed(residual, (residual * gain).bfloat16(), squares.contiguous(), EPS), gain


def normed(x: Normed) -> torch.Tensor:
    """What the matrix is multiplied by, exactly."""
    return x.scaled.double() * torch.rsqrt(x.residual.double().square().mean(-1, keepdim=True) + EPS)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to each row's length, the worst row."""
    distance = (found.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    return float(distance.nan_to_num(nan=float("inf")).max())


def how(matrix: Matrix, pairs: bool = False) -> tiling.Tiling:
    return tiling.choose(matrix, torch.cuda.get_device_properties(0).multi_processor_count, pairs=pairs)


@pytest.mark.parametrize(
    ("rows", "columns", "batch"),
    [(*shape, batch) for shape in SHAPES for batch in ((1, 2, 3, 4, 5, 8) if shape[1] == 256 else (1, 8))],
)
@pytest.mark.parametrize(("form", "group"), FORMATS)
def test_linear(
    library: KernelLibrary, launcher: Launcher, form: Format, group: int, rows: int, columns: int, batch: int
) -> None:
    matrix, exact = made(form, group, rows, columns)
    x, _ = stream(batch, columns)
    bias = torch.randn(rows, device="cuda")
    out = torch.full((batch, rows), float("nan"), device="cuda")
    launcher.enqueue([ops.linear(library, x, matrix, bias, out, how(matrix))])
    assert error(out, normed(x) @ exact.T + bias) < SUMMED


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize(("form", "group"), FORMATS)
def test_linear_residual(
    library: KernelLibrary, launcher: Launcher, form: Format, group: int, rows: int, columns: int, batch: int
) -> None:
    matrix, exact = made(form, group, rows, columns)
    x = torch.randn(batch, columns, device="cuda").bfloat16()
    before = torch.randn(batch, rows, device="cuda")
    gain = torch.rand(rows, device="cuda") + 0.5
    nan = float("nan")
    target = Normed(
        before.clone(),
        torch.full((batch, rows), nan, device="cuda", dtype=torch.bfloat16),
        torch.full((batch, rows // 8), nan, device="cuda"),
        EPS,
    )
    launcher.enqueue([ops.linear_residual(library, ResidualUpdate(x, target, gain), matrix, how(matrix))])
    expected = reference.linear_residual(before.double(), x.double(), exact, None)
    assert error(target.residual, expected) < SUMMED
    assert torch.equal(target.scaled, (target.residual * gain).bfloat16())
    assert error(target.squares, target.residual.double().square().view(batch, -1, 8).sum(-1)) < 1e-6


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(
    ("half", "columns"), [(3072, 1024), (136, 256), (14336, 4096), (7168, 4096), (4864, 896), (9728, 2560)]
)
@pytest.mark.parametrize(("form", "group"), FORMATS)
def test_gate_up(
    library: KernelLibrary, launcher: Launcher, form: Format, group: int, half: int, columns: int, batch: int
) -> None:
    matrix, exact = made(form, group, 2 * half, columns)
    x, _ = stream(batch, columns)
    bias = torch.randn(2 * half, device="cuda")
    out = torch.full((batch, half), float("nan"), device="cuda", dtype=torch.bfloat16)
    launcher.enqueue([ops.gate_up(library, x, matrix, bias, out, how(matrix, pairs=True))])
    gate, up = (normed(x) @ exact.T + bias).chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    assert error(out, expected) < 3e-3
    worst = (out.double() - expected).abs() - expected.abs() * 2**-8
    assert float(worst.max()) < 1e-5 * float(expected.abs().max())


def places(batch: int) -> RowPages:
    position = torch.arange(batch, dtype=torch.int32, device="cuda") * 7 + 3
    return RowPages(position, torch.zeros(batch, 1, dtype=torch.int32, device="cuda"))


@pytest.mark.parametrize("batch", [1, 4, 8])
@pytest.mark.parametrize(("rows", "columns"), [(1003, 256), (8192, 320), (151936, 1024), (32000, 4096)])
@pytest.mark.parametrize("form", [Format.BF16, Format.INT8])
def test_head(library: KernelLibrary, launcher: Launcher, form: Format, rows: int, columns: int, batch: int) -> None:
    matrix, exact = made(form, 0, rows, columns)
    x, _ = stream(batch, columns)
    temperature = torch.tensor([0.0, 0.7, 1e-3, 5.0, 0.0, 1.0, 0.9, 1e-40][:batch], device="cuda")
    keys = torch.tensor([seed_key(seed) for seed in range(batch)], device="cuda")
    choice = Choice(
        temperature,
        keys,
        torch.zeros(batch, dtype=torch.int64, device="cuda"),
        torch.full((batch, rows), float("nan"), device="cuda"),
    )
    assert choice.logits is not None
    at = places(batch)
    launcher.enqueue([tokens.head(library, x, matrix, choice, at, how(matrix))])
    assert error(choice.logits, normed(x) @ exact.T) < SUMMED
    chosen = ~(choice.best & 0xFFFFFFFF) & 0xFFFFFFFF
    assert torch.equal(chosen[temperature == 0], choice.logits.argmax(-1)[temperature == 0])
    expected = reference.choose(choice.logits, temperature, keys, at.position.long() + 1)
    assert torch.equal(chosen, expected)  # a near-tie would show as a rare failure: scores are 1e-6 apart at the least


@pytest.mark.parametrize(("form", "group"), FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(4096, 1024), (1024, 3072), (4096, 14336), (4096, 11008)])
def test_a_row_does_not_depend_on_the_batch(
    library: KernelLibrary, launcher: Launcher, form: Format, group: int, rows: int, columns: int
) -> None:
    matrix, _ = made(form, group, rows, columns)
    x, _ = stream(8, columns)
    together = torch.empty(8, rows, device="cuda")
    launcher.enqueue([ops.linear(library, x, matrix, None, together, how(matrix))])
    for batch in (1, 2, 4):
        for first in range(0, 8, batch):
            part = slice(first, first + batch)
            some = Normed(x.residual[part], x.scaled[part], x.squares[part], EPS)
            out = torch.empty(batch, rows, device="cuda")
            launcher.enqueue([ops.linear(library, some, matrix, None, out, how(matrix))])
            assert torch.equal(out, together[part])


def test_no_number_among_the_logits_is_told(library: KernelLibrary, launcher: Launcher) -> None:
    matrix, _ = made(Format.BF16, 0, 1000, 256)
    x, _ = stream(2, 256)
    x.scaled[1, 5] = float("nan")
    best = torch.zeros(2, dtype=torch.int64, device="cuda")
    choice = Choice(torch.zeros(2, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda"), best)
    launcher.enqueue([tokens.head(library, x, matrix, choice, places(2), how(matrix))])
    score = (best >> 32) & 0xFFFFFFFF
    assert 0x00800000 <= int(score[0]) <= 0xFF7FFFFF
    assert int(score[1]) == 0xFFFFFFFF


@pytest.mark.parametrize(("form", "group"), FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(1040, 896), (4096, 14336), (4096, 7168), (4096, 11008)])
def test_linear_of_older_cards(
    older_library: KernelLibrary, launcher: Launcher, form: Format, group: int, rows: int, columns: int
) -> None:
    matrix, exact = made(form, group, rows, columns)
    x, _ = stream(3, columns)
    out = torch.full((3, rows), float("nan"), device="cuda")
    launcher.enqueue([ops.linear(older_library, x, matrix, None, out, how(matrix)).alone()])
    assert error(out, normed(x) @ exact.T) < SUMMED
