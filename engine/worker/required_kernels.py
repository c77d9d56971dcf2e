"""Predicts which kernels a server will use before its weights are read: they are compiled meanwhile, or ahead by
`whippet prebuild`, on a machine without a GPU. Executors list them by their own start, over a model of shapes alone;
one that is missing here is compiled when it is used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from engine.errors import Unsupported
from engine.execution.graphs.batch import BUCKETS
from engine.execution.graphs.passes import MOST_CHUNKS
from engine.execution.graphs.prefill import SIZES, filled
from engine.execution.registry import EXECUTORS, leaders
from engine.execution.speculation.draft_model import DraftModel
from engine.execution.step_state import Parts, Unfit
from engine.kernels.attention import MIN_PAGES, PAGE, SPLITS
from engine.kernels.build import BuildError, GpuKernels, Source, WantedKernels
from engine.kernels.gpu import GpuShape
from engine.kv.kv_cache import KvCache, stored_as
from engine.kv.sizing import make_room
from engine.linear import Placement
from engine.linear.plain_copies import PlainCopies, plain_copies
from engine.loading.formats import FolderFormat
from engine.model.rope import RopeTables
from engine.model.transformer import Transformer, kv_shape
from engine.sampling.sampler import Sampler
from engine.settings import CUDA_BATCH_TOKENS, CUDA_SEQUENCES, EngineSettings
from engine.worker.hardware import DTYPES
from engine.worker.peer_memory import sums_of_shapes
from engine.worker.shapes import fewer_layers, shape_weights
from quant.checkpoint.config import ModelConfig

_MOST_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class KernelQuery:
    config: ModelConfig
    form: FolderFormat
    gpu: GpuShape
    free: int = _MOST_BYTES  # bytes of the GPU's memory, without the weights
    draft: tuple[ModelConfig, FolderFormat] | None = None  # of a draft model
    ranks: int = 1  # over which the model is split; `config` is one rank's


def required_kernels(settings: EngineSettings, what: KernelQuery) -> set[Source]:
    """Includes some more where it is not known how far memory will go."""
    wanted = WantedKernels(what.gpu)
    with torch.inference_mode():
        for parts in models_of_shapes(settings, what, wanted):
            decoder = _decoder(settings, parts)
            for entry in EXECUTORS:
                if entry.ask is None or entry.decoder != decoder or entry.why_not(parts) is not None:
                    continue
                try:
                    entry.ask(parts)
                except (BuildError, Unfit, ValueError):  # as when it is made: then it does not serve
                    continue
    return wanted.sources


def _decoder(settings: EngineSettings, parts: Parts) -> str | None:
    words = (one for one in leaders(EXECUTORS) if settings.decoder in ("auto", one.decoder))
    return next((one.decoder for one in words if one.why_not(parts) is None), None)


def required_kernels_any_context(settings: EngineSettings, what: KernelQuery) -> set[Source]:
    """Covers every `max-context` and `max-sequences`: the number of parts of a context decides which blocks of
    attention may wait for each other."""
    found = required_kernels(settings, what)
    for parts in range(1, SPLITS + 1):
        found |= required_kernels(replace(settings, max_context=parts * MIN_PAGES * PAGE), what)
    return found


def models_of_shapes(settings: EngineSettings, what: KernelQuery, wanted: WantedKernels) -> Iterator[Parts]:
    """Yields the model as it would be served; twice where plain copies of packed weights may have room or not."""
    dtype = _dtype(settings, what.config, what.form)
    full = shape_weights(what.config, what.form, dtype)
    config, weights = fewer_layers(what.config, full)
    sequences = settings.max_sequences or CUDA_SEQUENCES
    nowhere = Placement(dtype, torch.device("meta"))
    context = _context(settings, what, sequences, full.nbytes)
    model = Transformer(config, weights, _angles(config, context), nowhere)
    shape = kv_shape(config)
    pool = KvCache(shape, 1, nowhere, heads_outside=False, stored=stored_as(settings.kv_dtype, nowhere.dtype))
    sampler = Sampler(config.vocab_size, 1, torch.device("cpu"))
    linears = [one for layer in weights.layers for one in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    copies = plain_copies(linears, sequences, _MOST_BYTES, dtype)
    draft = None if what.draft is None else _draft(*what.draft, context)
    tokens = settings.max_batch_tokens or CUDA_BATCH_TOKENS[1]
    sums = sums_of_shapes(config, what.gpu, what.ranks, most_tokens(tokens)) if what.ranks > 1 else None
    for plain in (copies, PlainCopies()) if copies.held else (copies,):
        yield Parts(
            model,
            pool,
            sampler,
            sequences,
            context,
            tokens,
            plain=plain,
            draft=draft,
            gpu=GpuKernels(wanted),
            sums=sums,
        )


def most_tokens(batch_tokens: int) -> int:
    """Returns the most tokens of a captured pass, where steps have up to `batch_tokens` of prompts."""
    return max(filled(SIZES, batch_tokens)[-1], BUCKETS[-1], MOST_CHUNKS)


def _dtype(settings: EngineSettings, config: ModelConfig, form: FolderFormat) -> torch.dtype:
    """Returns what `pick_dtype` picks on a GPU with bfloat16."""
    if settings.dtype != "auto":
        return DTYPES[settings.dtype]
    stated = "float32" if config.dtype is None else config.dtype
    return torch.bfloat16 if form.in_memory is not None else DTYPES[stated]


def _angles(config: ModelConfig, context: int) -> RopeTables:
    return RopeTables(torch.empty(context, 2, config.head_dim, device="meta"))


def _draft(config: ModelConfig, form: FolderFormat, context: int) -> DraftModel:
    config, weights = fewer_layers(config, shape_weights(config, form, torch.bfloat16))
    nowhere = Placement(torch.bfloat16, torch.device("meta"))
    model = Transformer(config, weights, _angles(config, context), nowhere)
    pool = KvCache(kv_shape(config), 1, nowhere, heads_outside=False)
    return DraftModel(model, pool, Sampler(config.vocab_size, 1, torch.device("cpu")))


def _context(settings: EngineSettings, what: KernelQuery, sequences: int, weights: int) -> int:
    config = what.config
    shape = kv_shape(config)
    there = Placement(torch.bfloat16, torch.device("cuda"))
    try:
        return make_room(settings, sequences, config.max_context, shape, there, what.free - weights).max_context
    except Unsupported:  # reported to the caller once the weights are there
        return config.max_context
