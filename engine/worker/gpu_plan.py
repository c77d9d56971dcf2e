"""Plans how a GPU that is not here would serve a model: by which path, with which memory, and about how fast for one
user."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import torch

from engine.errors import Unsupported
from engine.execution.registry import ExecutorChoice
from engine.kernels import targets
from engine.kernels.build import Source
from engine.kernels.gpu import GpuShape
from engine.kernels.weights import Format
from engine.kv.sizing import Room, make_room
from engine.linear import Placement
from engine.linear.cuda import CudaLinear
from engine.linear.plain_copies import plain_copies
from engine.loading.formats import FolderFormat
from engine.model.transformer import kv_shape
from engine.model.weights import Weights
from engine.settings import CUDA_SEQUENCES, PAGE_SIZE, EngineSettings
from engine.worker.forecast import forecast
from engine.worker.hardware import DTYPES, dtype_of_gpu, with_pages
from engine.worker.known_gpus import KnownGpu
from engine.worker.required_kernels import KernelQuery
from engine.worker.shapes import shape_weights
from quant.checkpoint.config import ModelConfig

FUSED: Final = "fused"  # the path of the decoder "graph"
CONTEXT_BYTES: Final = 512 << 20  # of a GPU's memory, that a process has in use before any weights
STEP_TOKENS: Final = 1024  # that a sequence has, where a step's time is estimated
# A step of one row reads weights, keys and values with this share of the data sheet's bandwidth, and takes some time
# for each layer besides: from bench/results/decode-h100.json, whose four models this reproduces within 7 per cent
# (tests/lint/test_models.py).
BANDWIDTH_SHARE: Final = 0.78
LAYER_SECONDS: Final = 0.9e-6
FOUR_BIT_LAYER_SECONDS: Final = 8.0e-6


@dataclass(frozen=True, slots=True)
class KernelPlan:
    count: int  # that are compiled at a first start, at most
    sources: tuple[str, ...]
    not_offered: tuple[str, ...]  # sources that this architecture lacks
    not_offered_reason: str | None


@dataclass(frozen=True, slots=True)
class GpuPlan:
    gpu: KnownGpu
    architecture: str
    path: str  # "fused", or the decoder's word
    unpacked: bool  # some packed weights are kept in sixteen bits
    kernels: KernelPlan
    copies_bytes: int  # of plain copies beside packed weights: for many rows, or for all where no kernel reads those
    sequences: int  # at once
    tokens: int  # that all pages have room for
    step_bytes: int  # that a token reads
    tokens_per_second: float | None  # to one user; None: not by the fused path


@dataclass(frozen=True, slots=True)
class Planned:
    plan: GpuPlan
    choice: ExecutorChoice
    why_one_pass: str | None
    dtype: torch.dtype
    weights_bytes: int
    room: Room


def make_plan(
    settings: EngineSettings, config: ModelConfig, form: FolderFormat, gpu: KnownGpu, kernels: bool = True
) -> Planned:
    """Raises Unsupported for a model that has no room, or that the decoder of `settings` could not serve. `kernels`:
    whether they are listed."""
    packed = form.in_memory is not None
    dtype = dtype_of_gpu(config.dtype, packed) if settings.dtype == "auto" else DTYPES[settings.dtype]
    weights = shape_weights(config, form, dtype)
    free = gpu.memory_bytes - CONTEXT_BYTES
    if weights.nbytes > free:
        need, have = weights.nbytes / 2**30, free / 2**30
        raise Unsupported(f"the weights take {need:.1f} GiB, {have:.1f} of this GPU are free; use fewer bits")
    sequences, shape = settings.max_sequences or CUDA_SEQUENCES, kv_shape(config)
    copies = _copies_bytes(weights, sequences, free - weights.nbytes, dtype)
    left, there = free - weights.nbytes - copies, Placement(dtype, torch.device("cuda"))
    room = make_room(settings, sequences, config.max_context, shape, there, left)
    found = forecast(settings, KernelQuery(config, form, gpu.shape, gpu.memory_bytes), kernels)
    fused = found.choice.decoder == "graph"
    four = any(isinstance(one, CudaLinear) and one.matrix.format is Format.INT4 for one in weights.in_order())
    read = _step_bytes(config, weights, shape.page_bytes(dtype))
    plan = GpuPlan(
        gpu=gpu,
        architecture=gpu.architecture,
        path=FUSED if fused else found.choice.decoder,
        unpacked=packed and found.has_plain_layers,
        kernels=_kernel_plan(found.kernels, gpu.shape),
        copies_bytes=copies,
        sequences=settings.max_sequences or with_pages(sequences, room.pages),
        tokens=room.pages * PAGE_SIZE,
        step_bytes=read,
        tokens_per_second=1 / step_seconds(read, config.layers, four, gpu.bandwidth) if fused else None,
    )
    with torch.inference_mode():
        why_one_pass = found.parts.step_weights[1] if fused else None
    return Planned(plan, found.choice, why_one_pass, dtype, weights.nbytes, room)


def _kernel_plan(wanted: Collection[Source], gpu: GpuShape) -> KernelPlan:
    lacking = tuple(name for name in targets.OF_WARPGROUPS if targets.why_not(name, gpu) is not None)
    sources = tuple(sorted({name for name, _ in wanted}))
    return KernelPlan(len(wanted), sources, lacking, targets.NO_WARPGROUPS if lacking else None)


def step_seconds(read: int, layers: int, four_bits: bool, bandwidth: float) -> float:
    """Estimates a step of one row that reads `read` bytes. `bandwidth`: GB/s, of a data sheet."""
    each = FOUR_BIT_LAYER_SECONDS if four_bits else LAYER_SECONDS
    return layers * each + read / (BANDWIDTH_SHARE * bandwidth * 1e9)


def _copies_bytes(weights: Weights, sequences: int, free: int, dtype: torch.dtype) -> int:
    linears = [one for layer in weights.layers for one in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    copies = plain_copies(linears, sequences, free, dtype)
    return sum(one.nbytes for one in (*copies.held.values(), *copies.unread.values()))


def _step_bytes(config: ModelConfig, weights: Weights, page_bytes: int) -> int:
    """Counts all weights but a table of embeddings of its own, and the keys and values of a sequence."""
    table = 0 if config.tied_head else weights.embedding.nbytes
    return weights.nbytes - table + STEP_TOKENS // PAGE_SIZE * page_bytes
