"""Products with packed weights against products in float64, and a row alone against the same row among others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.weights import dequantize, to_matrix
from engine.linear import DenseLinear, Linear, Placement
from engine.linear.canonical import CanonicalLinear
from engine.linear.cpu import Int4Cpu, Int8Cpu
from engine.linear.cuda import CudaLinear
from engine.linear.joined import JoinedLinear
from engine.linear.products import LEVELS, CpuProducts, NoProducts, build_ahead, open_products
from engine.linear.quantized import place_weight, quantized_reader
from engine.worker.hardware import cpu_features
from quant.checkpoint.forms import Dense, Int4Groups, Int8Rows, Weight
from quant.checkpoint.spec import Int8Spec
from tests.properties import example_count

pytestmark = pytest.mark.isa

CPU = Placement(torch.float32, torch.device("cpu"))
ROWS = (1, 2, 3, 7, 8, 16, 17, 64, 65)  # tiles of every size, alone and after others


@pytest.fixture(scope="session")
def products() -> CpuProducts:
    return open_products(cpu_features().flags)


@pytest.fixture
def native(products: CpuProducts) -> Placement:
    return Placement(torch.float32, CPU.device, products)


def int4(rows: int, columns: int, group: int, seed: int = 0, scales: torch.dtype = torch.float16) -> Int4Groups:
    made = torch.Generator().manual_seed(seed)
    return Int4Groups(
        torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=made),
        ((torch.rand(rows, columns // group, generator=made) + 0.5) / columns**0.5).to(scales),
        torch.randint(0, 16, (rows, columns // group), dtype=torch.uint8, generator=made),
        group,
    )


def int8(rows: int, columns: int, seed: int = 0) -> Int8Rows:
    made = torch.Generator().manual_seed(seed)
    q = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=made)
    return Int8Rows(q, (torch.rand(rows, generator=made) + 0.5) / 64 / columns**0.5)


def product(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    y = x.double() @ weight.dequantize(torch.float64).T
    return y if bias is None else y + bias.double()


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def check(linear: Linear, weight: Weight, bias: torch.Tensor | None, x: torch.Tensor, tolerance: float) -> None:
    expected = product(x, weight, bias)
    found = linear(x)
    assert (found.shape, found.dtype) == (expected.shape, x.dtype)
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert float(error) < tolerance
    found.mul_(2.0)  # the caller's own


WEIGHTS = {
    "g32": int4(80, 256, 32),
    "a group a row": int4(1040, 256, 256),
    "groups of 8": int4(72, 96, 8),
    "bfloat16 scales": int4(40, 64, 32, scales=torch.bfloat16),
    "float32 scales": int4(33, 64, 32, scales=torch.float32),
    "int8": int8(80, 96),
    "odd int8": int8(7, 33),
    "bfloat16": Dense(torch.randn(83, 130, generator=torch.Generator().manual_seed(2)).bfloat16()),
    "float16": Dense(torch.randn(64, 96, generator=torch.Generator().manual_seed(2)).half()),
}


def placed(weight: Weight, bias: torch.Tensor | None, native: Placement) -> Linear:
    dtype = weight.weight.dtype if isinstance(weight, Dense) else native.dtype
    return place_weight(weight, bias, Placement(dtype, native.device, native.products))


@pytest.mark.product
@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_products_on_a_cpu(rows: int, biased: bool, weight: Weight, native: Placement) -> None:
    bias = noise(weight.shape[0]) if biased else None
    linear = placed(weight, bias, native)
    assert isinstance(linear, DenseLinear if isinstance(weight, Dense) else Int4Cpu | Int8Cpu)
    tolerance = 0.004 if biased and isinstance(weight, Dense) else 1e-6  # the bias is kept as the weight is
    check(linear, weight, bias, noise(rows, weight.shape[1]), tolerance)


@pytest.mark.product
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS.keys())
@pytest.mark.parametrize("threads", [1, 2])
def test_how_many_rows_a_step_has_does_not_show(weight: Weight, threads: int, native: Placement) -> None:
    linear = placed(weight, None, native)
    x = noise(max(ROWS), weight.shape[1])
    together = linear(x)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in ROWS:
            assert torch.equal(linear(x[-rows:]), together[-rows:])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_without_a_compiler_products_are_slow_and_right(
    weight: Weight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    with pytest.raises(NoProducts, match="no C compiler"):
        open_products((), tmp_path)
    linear = placed(weight, None, CPU)
    assert isinstance(linear, DenseLinear if isinstance(weight, Dense) else CanonicalLinear)
    check(linear, weight, None, noise(3, weight.shape[1]), 1e-6)


@pytest.mark.proof
def test_the_library_is_kept_and_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_products(cpu_features().flags, tmp_path)
    (kept,) = tmp_path.glob("products-*.so")
    made = kept.stat().st_mtime_ns
    open_products(cpu_features().flags, tmp_path)
    assert [kept.stat().st_mtime_ns] == [one.stat().st_mtime_ns for one in tmp_path.iterdir()] == [made]
    (tmp_path / "file").touch()
    open_products(cpu_features().flags, tmp_path / "file")  # a folder that cannot be made: for this process alone
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / kept.name).write_bytes(b"no library")
    with pytest.raises(NoProducts, match="cannot be used"):
        open_products(cpu_features().flags, tmp_path / "damaged")


@pytest.mark.proof
def test_libraries_that_were_built_ahead_need_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ahead, kept = tmp_path / "ahead" / "kernels", tmp_path / "kept"
    ahead.mkdir(parents=True)
    made = build_ahead(ahead)
    assert len(made) == len(set(made)) == len(LEVELS)
    monkeypatch.setenv("WHIPPET_PREBUILT_DIR", str(tmp_path / "ahead"))
    monkeypatch.setenv("WHIPPET_CACHE_DIR", str(kept))
    with monkeypatch.context() as patch:
        patch.setenv("CC", str(tmp_path / "none"))
        for flags in (cpu_features().flags, ()):
            open_products(flags)
    assert not kept.exists()
    assert not caplog.messages
    damaged = tmp_path / "damaged" / "kernels"
    damaged.mkdir(parents=True)
    for one in made:
        (damaged / one.name).write_bytes(b"no library")
    monkeypatch.setenv("WHIPPET_PREBUILT_DIR", str(tmp_path / "damaged"))
    open_products(cpu_features().flags)
    (line,) = caplog.messages
    assert line.startswith("products of narrow weights are compiled here: ")
    assert len(list(kept.rglob("products-*.so"))) == 1


@pytest.mark.parametrize("weight", [int4(1040, 256, 64), int8(1040, 96)], ids=["int4", "int8"])
def test_exact_products(weight: Weight) -> None:
    bias = noise(weight.shape[0])
    linear = place_weight(weight, bias, CPU)
    assert isinstance(linear, CanonicalLinear)
    assert linear.nbytes == weight.nbytes + bias.nbytes
    check(linear, weight, bias, noise(5, weight.shape[1]), 1e-6)


@pytest.mark.parametrize(
    ("weight", "dtype", "kind"),
    [
        (int4(64, 256, 64), torch.bfloat16, CudaLinear),
        (int4(64, 576, 64), torch.bfloat16, DenseLinear),
        (int4(64, 576, 64), torch.float16, CanonicalLinear),
        (int4(12, 256, 64), torch.bfloat16, DenseLinear),
        (int4(64, 256, 16), torch.bfloat16, DenseLinear),
        (int8(64, 96), torch.bfloat16, DenseLinear),
        (int8(64, 80), torch.bfloat16, CanonicalLinear),
    ],
    ids=["read", "columns", "float16", "rows", "group", "eight bits", "no bfloat16 either"],
)
def test_a_gpu_has_plain_weights_where_its_kernels_read_no_other_of_that_shape(
    weight: Int4Groups | Int8Rows, dtype: torch.dtype, kind: type
) -> None:
    parts = {name: getattr(weight, name) for name in weight.__slots__}
    nowhere = {name: part.to("meta") if isinstance(part, torch.Tensor) else part for name, part in parts.items()}
    linear = place_weight(type(weight)(**nowhere), None, Placement(dtype, torch.device("meta")))
    assert type(linear) is kind
    if isinstance(linear, DenseLinear):
        assert (linear.weight.shape, linear.weight.dtype) == (weight.shape, torch.bfloat16)


@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from([32, 64, 128, 0]), st.integers(0, 1 << 30))
@settings(max_examples=example_count(40), deadline=None)
def test_a_packed_matrix_unpacks_to_what_it_was(tiles: int, units: int, group: int, seed: int) -> None:
    columns = 128 * units
    weight = int4(8 * tiles, columns, group or columns, seed)
    matrix, expected = to_matrix(weight), weight.dequantize(torch.float32)
    assert torch.equal(dequantize(matrix, 0, 8 * tiles, torch.float32), expected)
    assert torch.equal(dequantize(matrix, 8 * tiles - 8, 8 * tiles, torch.float32), expected[-8:])


@pytest.mark.parametrize("weight", [int4(4104, 128, 64), int8(4100, 64), Dense(noise(40, 64).bfloat16())])
@pytest.mark.parametrize("biased", [False, True])
def test_the_slow_way_of_a_card(weight: Weight, biased: bool) -> None:
    bias = noise(weight.shape[0]) if biased else None
    linear = CudaLinear(to_matrix(weight), bias)
    assert linear.nbytes == linear.matrix.nbytes + (0 if bias is None else bias.nbytes)
    check(linear, weight, bias, noise(2, weight.shape[1]), 1e-6)


def test_parts_side_by_side() -> None:
    weights: list[Weight] = [int4(16, 64, 32), Dense(noise(24, 64)), int8(8, 64)]
    joined = JoinedLinear(tuple(place_weight(weight, None, CPU) for weight in weights))
    x = noise(3, 64)
    expected = torch.cat([product(x, weight, None) for weight in weights], dim=1)
    assert torch.allclose(joined(x).double(), expected, atol=1e-5)
    assert joined.nbytes == sum(weight.nbytes for weight in weights)


def test_plain_parts_are_plain_linears() -> None:
    weight, bias = Dense(noise(24, 64).half()), noise(24).half()
    linear = place_weight(weight, bias, Placement(torch.bfloat16, CPU.device))
    assert isinstance(linear, DenseLinear)
    assert linear.weight.dtype == torch.bfloat16
    assert linear.bias is not None
    assert linear.bias.dtype == torch.bfloat16


@pytest.mark.product
@pytest.mark.parametrize("group", [32, 64, 128])
def test_bytes_of_four_bits(group: int, native: Placement) -> None:
    """Half a byte a weight, and three bytes a group, against two bytes a weight."""
    linear = place_weight(int4(256, 512, group), None, native)
    share = linear.nbytes / (256 * 512 * 2)
    assert share == 0.25 + 1.5 / group
    assert share <= 0.30


def test_quantized_weights_are_not_quantized_again() -> None:
    with pytest.raises(ValueError, match="already"):
        quantized_reader(Int8Spec(), "int8")
