"""What the coarse copy of a head promises: no sum of float32, in whatever order, leaves its bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from engine.kernels import reference, two_pass
from engine.kernels.two_pass import coarse_copy, coarse_rows
from engine.kernels.weights import Format, Matrix

WARPS = 8
FACTORS = {"huge": 1e30, "tiny": 1e-25, "denormal": 1e-39, "zeros": 0.0}
# What a row, and what an activation, is made of.
KINDS = [*FACTORS, "plain", "one", "outlier", "mixed", "eight bits", "infinite", "none"]


def vector(kind: str, columns: int, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(columns, generator=generator) * FACTORS.get(kind, 1.0)
    if kind == "one":
        values.fill_(0.5)
    elif kind == "outlier":
        values[3] = 5000.0
    elif kind == "mixed":
        values *= torch.logspace(-30, 10, columns)
    elif kind == "eight bits":  # nothing is lost in the copy: what is left are float32's own roundings
        values = torch.randint(-127, 128, (columns,), generator=generator) / 8
        values[0] = 127 / 8
    elif kind in ("infinite", "none"):
        values[1] = torch.inf if kind == "infinite" else torch.nan
    return values.bfloat16()


def head(rows: torch.Tensor) -> Matrix:
    return Matrix(Format.BF16, rows.shape[0], rows.shape[1], rows)


def sums(rows: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """Σ w·x of every row in float32, added up in several orders."""
    products = rows.float() * x.float()
    one_by_one = products[:, 0].clone()
    for column in range(1, products.shape[1]):
        one_by_one += products[:, column]
    falling = products.sort(1, descending=True).values.cumsum(1)[:, -1]
    return [one_by_one, products.sum(1), falling, products.view(products.shape[0], 8, -1).sum(2).sum(1)]


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=3, max_size=9),
    of_x=st.sampled_from(KINDS),
    factor=st.sampled_from([1e-3, 1.0, 37.5, 1e3]),
    columns=st.sampled_from([64, 320]),
    seed=st.integers(0, 2**31),
)
@example(kinds=["plain"] * 9, of_x="plain", factor=1.0, columns=320, seed=1)
@example(kinds=["eight bits"] * 9, of_x="plain", factor=1.0, columns=320, seed=1)
@example(kinds=["one", "one", "zeros"], of_x="one", factor=1.0, columns=64, seed=1)
@example(kinds=["plain", "none", "infinite"], of_x="plain", factor=1.0, columns=64, seed=1)
def test_every_logit_lies_between_its_bounds(
    kinds: list[str], of_x: str, factor: float, columns: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.stack([vector(kind, columns, generator) for kind in kinds])
    x = vector(of_x, columns, generator)
    low, high = reference.between(coarse_copy(head(rows), WARPS), x.unsqueeze(0), torch.tensor([factor]))
    again = reference.may_win(low, high)[0]
    for total in sums(rows, x):
        logits = total * torch.tensor(factor)
        assert not ((logits < low[0]) | (logits > high[0])).any()
        # Where one is no number the plain head tells so: it must be among those that are multiplied again.
        assert again[logits.isnan()].all()
        assert again[logits.argmax()]


def test_the_copy_is_near() -> None:
    """Of normal rows the bound is 1 % of the row's length, so few rows are left."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(5000, 1024, generator=generator).bfloat16()
    copy = coarse_copy(head(rows), WARPS)
    q, scale, bound = coarse_rows(copy)
    assert float(((q * scale.unsqueeze(1) - rows.double()).norm(dim=1) <= bound).double().mean()) == 1
    assert float((bound / rows.double().norm(dim=1)).max()) < 0.013
    x = torch.randn(16, 1024, generator=generator).bfloat16()
    again = reference.may_win(*reference.between(copy, x, torch.ones(16)))
    assert int(again.sum(1).min()) >= 1
    assert float(again.sum(1).float().mean()) < 20
    assert copy.nbytes <= two_pass.copy_bytes(head(rows)) < rows.nbytes * 0.51


def test_the_worst_activation_nearly_reaches_the_bound() -> None:
    """One that points the way the row was rounded: a bound that is any tighter would be wrong."""
    rows = torch.randn(64, 1024, generator=torch.Generator().manual_seed(5)).bfloat16()
    copy = coarse_copy(head(rows), WARPS)
    q, scale, bound = coarse_rows(copy)
    rounding = rows.double() - q * scale.unsqueeze(1)
    x = rounding.bfloat16()
    apart = ((rounding * x.double()).sum(1) / x.double().norm(dim=1)).abs()
    assert ((apart <= bound) & (apart > bound * 0.97)).all()


def test_rows_that_tie_are_all_multiplied_again() -> None:
    rows = torch.ones(40, 64).bfloat16()
    rows[::2] = -1
    low, high = reference.between(coarse_copy(head(rows), WARPS), torch.ones(1, 64).bfloat16(), torch.ones(1))
    assert reference.may_win(low, high)[0].nonzero().flatten().tolist() == list(range(1, 40, 2))


def test_rows_are_any_number_and_lie_as_a_warp_reads_them() -> None:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(20003, 128, generator=generator).bfloat16()  # more than are worked on at once
    copy = coarse_copy(head(rows), WARPS)
    assert copy.matrix.data.shape == (2501, 2, 32, 16)
    q, scale, _ = coarse_rows(copy)
    assert torch.equal(q[16009, 64 + 33], copy.matrix.data[2001, 1, 4 * 1 + 2, 1].double())
    assert float((q * scale.unsqueeze(1) - rows.double()).abs().max() / rows.double().abs().max()) < 0.005
    assert torch.equal(q.abs().amax(1).clamp(min=126), q.abs().amax(1))


@pytest.mark.parametrize(
    ("form", "rows", "columns", "words"),
    [
        (Format.INT8, 151936, 1024, "int8 already"),
        (Format.INT4, 151936, 1024, "int4 already"),
        (Format.BF16, 151936, 1056, "no multiple of 64"),
        (Format.BF16, 8192, 256, "4.0 MiB"),
    ],
)
def test_heads_that_would_gain_nothing(form: Format, rows: int, columns: int, words: str) -> None:
    assert words in (two_pass.why_not(Matrix(form, rows, columns, torch.empty(0))) or "")


@pytest.mark.parametrize(
    ("rows", "columns"), [(151936, 1024), (151936, 1088), (32000, 4096), (128256, 2048), (262144, 2560)]
)
def test_heads_that_gain(rows: int, columns: int) -> None:
    assert two_pass.why_not(Matrix(Format.BF16, rows, columns, torch.empty(0))) is None
