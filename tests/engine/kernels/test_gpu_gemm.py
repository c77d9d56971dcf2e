"""The matrix kernel for many tokens on a GPU, against float64: every format, any number of tokens, any division."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.kernels.build import KernelLibrary
from engine.kernels.gemm import BLOCKS, WIDE_BLOCKS, Batch, GemmDivision, divide, gemm, order, ordered, with_stages
from engine.kernels.gpu import gpu_shape
from engine.kernels.launch import Launch, Launcher
from engine.kernels.weights import Format, Matrix, dequantize, to_matrix
from quant.checkpoint.forms import Int4Groups, Int8Rows

pytestmark = pytest.mark.gpu

SUMMED = 3e-5  # float32 sums against float64 of the same bf16 inputs
ROUNDED = 3e-3  # results in bf16
FORMATS = ["int8", "int4-128", "int4-64", "int4-32", "int4-row"]
TOKENS = [1, 7, 9, 16, 17, 33, 64, 90, 100, 128, 129, 192, 300, 1024]


def made(form: str, rows: int, columns: int) -> tuple[Matrix, torch.Tensor]:
    """A random matrix as the kernels read it and the same in float64."""
    if form == "int8":
        q = torch.randint(-128, 128, (rows, columns), device="cuda", dtype=torch.int8)
        weight = Int8Rows(q, torch.rand(rows, device="cuda") * 0.02 + 0.001)
        return to_matrix(weight), q.double() * weight.scale.double().unsqueeze(1)
    group = columns if form == "int4-row" else int(form.partition("-")[2])
    packed = torch.randint(0, 256, (rows, columns // 2), device="cuda", dtype=torch.uint8)
    scale = (torch.rand(rows, columns // group, device="cuda") * 0.02 + 0.001).half()
    zero = torch.randint(0, 16, (rows, columns // group), device="cuda", dtype=torch.uint8)
    exact = torch.stack((packed & 15, packed >> 4), -1).flatten(1).double()
    exact -= zero.repeat_interleave(group, 1)
    return to_matrix(Int4Groups(packed, scale, zero, group)), exact * scale.double().repeat_interleave(group, 1)


def multiplied(matrix: Matrix, exact: torch.Tensor, how: GemmDivision) -> torch.Tensor:
    """The weights as this division has them, float64: the wide kernel's four bits are those of plain copies."""
    if not how.wide or matrix.format is not Format.INT4:
        return exact
    return dequantize(matrix, 0, matrix.rows, torch.bfloat16).double()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to each token's length, the worst token."""
    distance = (found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(distance.nan_to_num(nan=float("inf")).max())


def poisoned(matrix: Matrix, tokens: int, how: GemmDivision) -> torch.Tensor:
    shape = (tokens, matrix.rows) if how.slices == 1 else (how.slices, tokens, matrix.rows)
    dtype = torch.bfloat16 if how.slices == 1 else torch.float32
    return torch.full(shape, float("nan"), device="cuda", dtype=dtype)


def product(library: KernelLibrary, matrix: Matrix, batch: Batch, how: GemmDivision) -> Launch:
    """Of tokens whose columns lie plainly."""
    return gemm(library, matrix, replace(batch, x=ordered(batch.x, order(matrix, how))), how).alone()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(264, 256), (1040, 896), (4096, 4096), (1024, 14336)])
def test_any_number_of_tokens(library: KernelLibrary, launcher: Launcher, form: str, rows: int, columns: int) -> None:
    matrix, exact = made(form, rows, columns)
    gpu = gpu_shape(torch.device("cuda"))
    for tokens in TOKENS:
        x = (torch.randn(tokens, columns, device="cuda") * torch.rand(tokens, 1, device="cuda")).bfloat16()
        how = divide(matrix, tokens, gpu)
        expected = x.double() @ multiplied(matrix, exact, how).T
        assert error(expected, x.double() @ exact.T) < 2 * ROUNDED
        for slices in {min(n, columns // matrix.format.span) for n in (1, how.slices, 2, 3)}:
            for block in WIDE_BLOCKS if how.wide else ((how.tokens, how.rows),):
                one = with_stages(GemmDivision(*block, slices, wide=how.wide), matrix.shape, gpu)
                out = poisoned(matrix, tokens, one)
                launcher.enqueue([product(library, matrix, Batch(x, out), one)])
                if one.slices == 1:
                    assert error(out, expected) < ROUNDED, (tokens, one)
                else:
                    assert error(out.double().sum(0), expected) < SUMMED, (tokens, one)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("block", BLOCKS)
def test_every_tile_with_a_bias(library: KernelLibrary, launcher: Launcher, form: str, block: tuple[int, int]) -> None:
    tile, _ = block
    matrix, exact = made(form, 392, 1024)
    narrow = replace(gpu_shape(torch.device("cuda")), warpgroups=False)
    gpu = gpu_shape(torch.device("cuda"))
    bias = torch.randn(392, device="cuda")
    for tokens in (1, tile - 3, tile, 2 * tile + 5):
        x = torch.randn(tokens, 1024, device="cuda").bfloat16()
        how = with_stages(GemmDivision(*block, 1), matrix.shape, gpu)
        for one in {
            how,
            replace(divide(matrix, tile, narrow), slices=1),
            replace(divide(matrix, tile, gpu), slices=1),
        }:
            out = poisoned(matrix, tokens, one)
            launcher.enqueue([product(library, matrix, Batch(x, out, bias), one)])
            assert error(out, x.double() @ multiplied(matrix, exact, one).T + bias) < ROUNDED


def test_rows_of_eight_bits_are_any_number(library: KernelLibrary, launcher: Launcher) -> None:
    matrix, exact = made("int8", 1003, 320)
    x = torch.randn(77, 320, device="cuda").bfloat16()
    how = divide(matrix, 77, gpu_shape(torch.device("cuda")))
    for slices in (1, 2):
        one = replace(how, slices=slices)
        out = poisoned(matrix, 77, one)
        launcher.enqueue([product(library, matrix, Batch(x, out), one)])
        found = out if slices == 1 else out.double().sum(0)
        assert error(found, x.double() @ exact.T) < ROUNDED


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("wide", [False, True])
def test_a_token_does_not_depend_on_the_others(
    library: KernelLibrary, launcher: Launcher, form: str, wide: bool
) -> None:
    matrix, _ = made(form, 512, 1024)
    gpu = gpu_shape(torch.device("cuda"))
    if wide and not gpu.warpgroups:
        pytest.skip("needs compute capability 9.0")
    x = torch.randn(300, 1024, device="cuda").bfloat16()
    how = replace(divide(matrix, 64, replace(gpu, warpgroups=wide)), slices=2)
    assert how.wide == wide
    together = poisoned(matrix, 300, how)
    launcher.enqueue([product(library, matrix, Batch(x, together), how)])
    for first, last in ((0, 1), (5, 70), (64, 128), (299, 300)):
        part = poisoned(matrix, last - first, how)
        launcher.enqueue([product(library, matrix, Batch(x[first:last].contiguous(), part), how)])
        assert torch.equal(part, together[:, first:last])


@pytest.mark.parametrize("form", ["int8", "int4-64"])
def test_older_cards(older_library: KernelLibrary, launcher: Launcher, form: str) -> None:
    matrix, exact = made(form, 1040, 896)
    x = torch.randn(100, 896, device="cuda").bfloat16()
    how = GemmDivision(*BLOCKS[-1], 1, 3)
    out = poisoned(matrix, 100, how)
    launcher.enqueue([product(older_library, matrix, Batch(x, out), how)])
    assert error(out, x.double() @ exact.T) < ROUNDED
