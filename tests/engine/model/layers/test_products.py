"""Prompts in graphs where there is no GPU for them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.errors import Unsupported
from engine.kernels.build import WantedKernels
from engine.kernels.gpu import GpuShape
from engine.kernels.launch import Launch
from engine.kernels.weights import Format, Matrix
from engine.linear import DenseLinear
from engine.linear.chosen import ChosenProducts
from engine.linear.cuda import CudaLinear
from engine.linear.plain_copies import PlainCopies
from engine.model.layers import many_tokens, products
from engine.model.layers.products import Products
from engine.model.norm import RmsNorm
from engine.model.weights import Layer
from engine.settings import EngineSettings
from engine.worker.build import PreparedModel, make_runner, prepare

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
}


def watch(name: str, done: int, total: int) -> None:
    """Nobody watches."""


def prepared(folder: Path) -> tuple[EngineSettings, PreparedModel]:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    settings = EngineSettings(model=str(folder), device="cpu", load_format="dummy", max_sequences=2, threads=1)
    return settings, prepare(settings, watch)


def test_a_cpu_has_none(tmp_path: Path) -> None:
    _, found = prepared(tmp_path)
    assert "CUDA" in (many_tokens.why_not(found.parts) or "")


def test_a_switch_that_no_decoder_has_is_refused(tmp_path: Path) -> None:
    runner = make_runner(*prepared(tmp_path), watch)
    with pytest.raises(Unsupported, match="warp"):
        runner.set_optimization("warp", True)


def test_linears_that_no_kernel_multiplies_by_are_named() -> None:
    class Odd:
        nbytes = 0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x

    assert products.why_not(Odd()) == "linears of type Odd"
    assert products.why_not(DenseLinear(torch.ones(2, 2))) is None
    matrix = Matrix(Format.INT8, 8, 64, torch.zeros(8, 64, dtype=torch.int8), row_scale=torch.ones(8))
    assert products.why_not(CudaLinear(matrix, None)) is None


def test_a_product_of_few_tokens_is_a_kernel_of_ours_that_may_leave_slices() -> None:
    gpu, launched = GpuShape(132, 227 << 10, warpgroups=True), Chain()
    found = Products(WantedKernels(gpu), launched, gpu, True, PlainCopies(), ChosenProducts())
    down = DenseLinear(torch.empty(1024, 3072, device="meta", dtype=torch.bfloat16))
    x = torch.empty(64, 3072, device="meta", dtype=torch.bfloat16)
    room = torch.empty(found.bytes_of(down, 64), device="meta", dtype=torch.uint8)
    parts = found(down, x, room)
    assert launched.names == ["plain_product"]
    assert parts.split
    assert parts.data.numel() * 4 == room.numel()
    assert not found(down, x, room, most_slices=1).split


class Chain:
    """Kernels' names, as they are enqueued."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def enqueue(self, launches: Iterable[Launch]) -> None:
        self.names += [launch.kernel.name for launch in launches]


@pytest.mark.parametrize(
    ("rows", "columns", "tokens", "bias", "chain"),
    [
        (28672, 4096, 256, False, ["gated_product"]),
        (28672, 4096, 384, False, ["gate"]),
        (28672, 4096, 256, True, ["gate"]),
        (6144, 1024, 512, False, ["gated_product"]),
        (6144, 1024, 300, False, ["gate"]),
        (6144, 1024, 64, False, ["plain_product"]),
        (16384, 2048, 64, False, ["plain_product"]),
        (6144, 1024, 64, True, ["gate"]),
    ],
)
def test_a_product_and_its_gate_are_one_kernel_where_that_is_faster(
    rows: int, columns: int, tokens: int, bias: bool, chain: list[str]
) -> None:
    gpu, launched = GpuShape(132, 227 << 10, warpgroups=True), Chain()
    found = Products(WantedKernels(gpu), launched, gpu, True, PlainCopies(), ChosenProducts())

    def nowhere(*size: int) -> torch.Tensor:
        return torch.empty(size, device="meta", dtype=torch.bfloat16)

    def linear(outputs: int, inputs: int) -> DenseLinear:
        return DenseLinear(nowhere(outputs, inputs), nowhere(outputs) if bias else None)

    gate_up, other = linear(rows, columns), linear(columns, columns)
    norm = RmsNorm(nowhere(columns), 1e-6)
    layer = Layer(norm, other, None, other, norm, gate_up, other, None)
    room = torch.empty(tokens * rows * 2, device="meta", dtype=torch.uint8)
    found.gated(gate_up, nowhere(tokens, columns), room, nowhere(tokens, rows // 2), Format.BF16)
    assert launched.names == chain
    plain = 0 if chain != ["gate"] else tokens * rows * 2
    assert found.layer_bytes(layer, tokens) == max(plain, found.bytes_of(other, tokens))
    # the next product may be in four bits, without a plain copy, and want its columns in an order of its own
    found.gated(gate_up, nowhere(tokens, columns), room, nowhere(tokens, rows // 2), Format.INT4)
    assert launched.names[len(chain) :][-1] == "gate"
    packed = CudaLinear(Matrix(Format.INT4, columns, rows // 2, nowhere(1), group=128), None)
    wanted = max(*(found.bytes_of(one, tokens) for one in (gate_up, other, packed)))
    assert found.layer_bytes(replace(layer, down=packed), tokens) == wanted
