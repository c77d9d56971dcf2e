"""Builds a runner from settings: device, weights, page pool, executors. Everything `auto` is decided here."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace

from engine.api import ModelInfo
from engine.constraints.constraints import Constraints
from engine.errors import InvalidModel, Unsupported
from engine.execution.registry import EXECUTORS, ExecutorChoice, ExecutorEntry, choose
from engine.execution.runner import ModelRunner
from engine.execution.step_state import Parts
from engine.fake import plain_request
from engine.kernels.build import BuildError, GpuKernels, default_cache, open_library
from engine.kernels.context import keep_little
from engine.kv.kv_cache import KvCache, stored_as
from engine.kv.sizing import Room, make_room
from engine.linear import DenseLinear, Placement
from engine.linear.chosen import ChosenProducts
from engine.linear.plain_copies import plain_copies
from engine.linear.products import CpuProducts, NoProducts, open_products
from engine.loading.border import AGAIN
from engine.loading.formats import FolderFormat, read_folder
from engine.loading.load import LoadedWeights, Loading, load
from engine.loading.progress import Progress
from engine.model.layers import few_rows_weights
from engine.model.rope import rope_tables
from engine.model.split import WHOLE
from engine.model.transformer import Transformer, kv_shape
from engine.sampling.sampler import Sampler
from engine.scheduling.plan import Admitted, Released, Row, StepPlan
from engine.settings import CPU_BATCH_TOKENS, PAGE_SIZE, EngineSettings
from engine.worker.draft import Drafting, read_draft
from engine.worker.hardware import (
    CpuFeatures,
    batch_tokens,
    cpu_features,
    free_bytes,
    most_sequences,
    operations_per_second,
    pick_device,
    pick_dtype,
    pick_threads,
    pick_walkers,
    with_pages,
)
from engine.worker.mirror import FirstRank, Split
from engine.worker.offers import SWITCHES, proposers_of, unused
from engine.worker.required_kernels import KernelQuery, required_kernels
from engine.worker.splitting import Membership, connect_ranks, start_ranks, weight_bytes
from quant.checkpoint.config import ModelConfig

_log = logging.getLogger(__name__)
TOO_LARGE = ("allocate memory", "size calculation overflowed")  # what torch says where a CPU has too little


@dataclass(frozen=True, slots=True)
class PreparedModel:
    parts: Parts
    room: Room
    digest: str
    weight_format: str
    config: ModelConfig  # of the whole model, of which the parts may be one rank's
    weights_bytes: int  # of all ranks
    split: Split | None = None


def build(settings: EngineSettings, progress: Progress, constraints: Constraints | None = None) -> ModelRunner:
    """Raises InvalidModel or Unsupported, each one line."""
    runner = make_runner(settings, prepare(settings, progress, constraints), progress)
    _try(runner, Path(settings.model))
    return runner


def _kernels(settings: EngineSettings, what: Loading, draft: Loading | None) -> GpuKernels:
    """Begins to compile the model's kernels. Where that is impossible, their users report why."""
    device = what.placement.device
    if device.type != "cuda" or settings.decoder == "eager":
        return GpuKernels()
    try:
        library = open_library(torch.cuda.get_device_capability(device))
    except BuildError:
        return GpuKernels()
    memory = torch.cuda.get_device_properties(device).total_memory
    own = None if draft is None else (draft.config, draft.form)
    query = KernelQuery(what.own_config, what.form, library.gpu, memory, own, what.part.ranks)
    library.compile_ahead(required_kernels(settings, query))
    return GpuKernels(library)


def _try(runner: ModelRunner, folder: Path) -> None:
    """Runs one step before requests are served: weights that are damaged anywhere give no number. Raises
    InvalidModel."""
    info, asked = runner.info, plain_request((0,))
    pages = range(min(info.total_pages, 1 + -(-info.lookahead_tokens // info.page_size)))
    sampling = replace(asked.sampling, temperature=1.0)  # a greedy choice overlooks minus infinity
    entered = Admitted(
        key=0, slot=0, token_ids=(0,), prompt_length=1, sampling=sampling, stopping=asked.stopping, logprobs=None
    )
    found = runner.run(StepPlan((Row(0, 0, 0, 1, True, 0, tuple(pages)),), admitted=(entered,)))
    runner.run(StepPlan((), released=(Released(key=0, slot=0),)))
    if not found.rows[0].token_ids:
        runner.close()
        raise InvalidModel(f"{folder}: its weights compute NaN or infinity; {AGAIN}")


def prepare(
    settings: EngineSettings,
    progress: Progress,
    constraints: Constraints | None = None,
    member: Membership | None = None,
) -> PreparedModel:
    """Loads the model, or the part of it that `member` of a group has. Without one, a model that is to be split has its
    other ranks started here."""
    if member is not None:
        return _prepare(settings, progress, constraints, member)
    ranks = start_ranks(settings, progress)
    try:
        return _prepare(settings, progress, constraints, ranks)
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def _prepare(
    settings: EngineSettings, progress: Progress, constraints: Constraints | None, member: Membership | None
) -> PreparedModel:
    folder = Path(settings.model)
    config, form = read_folder(folder, settings.quantization)
    device = pick_device(settings.device)
    part = WHOLE if member is None else member.part
    here = 1 if member is None else member.here
    # The first rank alone drafts: what it verifies, all compute.
    drafts = settings.draft_model if part.first else None
    draft = read_draft(Path(drafts), folder, config) if drafts else None
    what = dataclasses.replace(_loading(settings, config, form, device, progress), part=part)
    own = None if draft is None else _loading(settings, draft.config, draft.form, device, progress)
    _check_size(folder, what)
    if draft is not None and own is not None:
        _check_size(draft.folder, own)
    gpu = _kernels(settings, what, own)
    if device.type == "cpu":
        torch.set_num_threads(max(1, pick_threads(settings.threads) // here))
    try:
        with torch.inference_mode():
            if device.type == "cuda":
                keep_little(device)
            loaded = load(settings, folder, what, progress)
            drafting = None
            if draft is not None and own is not None:
                drafting = Drafting(draft, load(settings, draft.folder, own, progress), own.placement)
            split = None
            if member is not None:
                tokens = settings.max_batch_tokens or _batch_tokens(what.own_config, device)
                split = connect_ranks(settings, what, loaded.digest, member, gpu, tokens, progress)
            known = constraints or Constraints(settings.model)
            return _assemble(settings, what, loaded, drafting, known, gpu, split)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise Unsupported(_no_room(folder, device, error)) from error
    except RuntimeError as error:
        if not any(sign in str(error) for sign in TOO_LARGE):
            raise
        raise Unsupported(_no_room(folder, device, error)) from error


def _loading(
    settings: EngineSettings, config: ModelConfig, form: FolderFormat, device: torch.device, progress: Progress
) -> Loading:
    cpu, quantized = cpu_features(), form.in_memory is not None
    dtype = pick_dtype(settings.dtype, config.dtype, device, cpu, quantized)
    narrow = device.type == "cpu" and (quantized or dtype != torch.float32)
    return Loading(
        config, form.on(device.type), Placement(dtype, device, _products(settings, cpu, progress) if narrow else None)
    )


def _check_size(folder: Path, what: Loading) -> None:
    """Checks sizes before allocating: memory that the system promises and does not have ends the process. Raises
    Unsupported."""
    placement = what.placement
    ranks = what.part.ranks if placement.device.type == "cuda" else 1  # on a CPU, all share its memory
    least = weight_bytes(what.config, what.form, placement.dtype) // ranks
    free = free_bytes(placement.device)
    if least > free:
        raise Unsupported(_no_room(folder, placement.device, f"the weights take {least} bytes, {free} are free"))


def _products(settings: EngineSettings, cpu: CpuFeatures, progress: Progress) -> CpuProducts | None:
    progress("compiling", 0, 1)
    try:
        return open_products(cpu.flags, walkers=pick_walkers(settings.threads))
    except NoProducts as failure:
        _log.warning("weights of fewer than 32 bits are slow here: %s; install gcc or clang", failure)
        return None


def _assemble(
    settings: EngineSettings,
    what: Loading,
    loaded: LoadedWeights,
    drafting: Drafting | None,
    constraints: Constraints,
    gpu: GpuKernels,
    split: Split | None,
) -> PreparedModel:
    config, placement, device, weights = what.own_config, what.placement, what.placement.device, loaded.weights
    shape = kv_shape(config)
    sequences = settings.max_sequences or most_sequences(device)
    linears = [one for layer in weights.layers for one in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    plain = plain_copies(linears if device.type == "cuda" else (), sequences, free_bytes(device), placement.dtype)
    dense = [one for one in (*linears, *plain.held.values()) if isinstance(one, DenseLinear)]
    chosen = ChosenProducts(dense, _products_folder())
    beside = 0 if drafting is None else drafting.page_bytes
    room = _room(settings, what, sequences, beside, split)
    if room.lacking is not None and what.part.first:
        _log.warning("%s", room.lacking)
    if settings.max_sequences is None and device.type == "cuda":
        sequences = with_pages(sequences, room.pages)
    ropes = rope_tables(config, room.max_context, device)
    model = Transformer(config, weights, ropes, placement) if split is None else split.model(what, weights, ropes)
    stored = stored_as(settings.kv_dtype, placement.activations.dtype)
    pool = KvCache(shape, room.pages, placement.activations, device.type == "cpu", stored)
    sampler = Sampler(config.vocab_size, sequences, device, constraints)
    draft = None if drafting is None else drafting.make(room, sequences, constraints)
    context = room.max_context
    parts = Parts(
        model,
        pool,
        sampler,
        sequences,
        context,
        settings.max_batch_tokens or _batch_tokens(config, device),
        constraints=constraints,
        plain=plain,
        chosen=chosen,
        draft=draft,
        gpu=gpu,
        group=None if split is None else split.group(pool, what.config),
        sums=None if split is None else split.sums,
    )
    if split is not None and split.sums is not None:
        _agree_on_head(parts, split)
    held = weights.nbytes if split is None else split.total(weights.nbytes)
    return PreparedModel(parts, room, loaded.digest, loaded.weight_format, what.config, held, split)


def _agree_on_head(parts: Parts, split: Split) -> None:
    """Reads the head in two passes on all ranks or on none, since they are to launch the same."""
    if few_rows_weights.why_not(parts) is not None:
        return
    read, reason = parts.step_weights
    if split.least(int(read.coarse is not None)) == 0 and read.coarse is not None:
        read, reason = dataclasses.replace(read, coarse=None), "another GPU has no room for a copy of the head"
    parts.decode.made = read, reason


def _room(settings: EngineSettings, what: Loading, sequences: int, beside: int, split: Split | None) -> Room:
    """Returns room for sequences; for a rank of a split model what all ranks have."""
    config, activations = what.own_config, what.placement.activations
    free = free_bytes(what.placement.device)
    if split is None:
        return room_of_rank(settings, sequences, config, activations, free, beside)
    free = split.least(free)
    if what.placement.device.type == "cuda":
        free *= what.part.ranks  # each has a GPU of its own
    room = room_of_rank(settings, sequences, config, activations, free, beside, what.part.ranks)
    pages, context = split.least(room.pages), split.least(room.max_context)
    return dataclasses.replace(room, pages=pages, max_context=context)


def room_of_rank(
    settings: EngineSettings,
    sequences: int,
    config: ModelConfig,
    activations: Placement,
    free: int,
    beside: int = 0,
    ranks: int = 1,
) -> Room:
    """Returns room for sequences in an equal share of `free` bytes of memory, and of those that the settings allow.
    `config`: of one rank. Raises Unsupported."""
    allowed = settings.kv_bytes
    if ranks > 1 and allowed is not None:
        settings = dataclasses.replace(settings, kv_bytes=allowed // ranks)
    context = config.max_context
    return make_room(settings, sequences, context, kv_shape(config), activations, free // ranks, beside)


def _products_folder() -> Path | None:
    """Keeps the choice of products; None for a user without a home, who has it made at each start."""
    try:
        return default_cache().parent / "products"
    except RuntimeError:
        return None


def make_runner(
    settings: EngineSettings,
    prepared: PreparedModel,
    progress: Progress,
    registry: tuple[ExecutorEntry, ...] = EXECUTORS,
) -> ModelRunner:
    """Chooses and warms executors. Raises Unsupported where the decoder asked for cannot serve."""
    parts, room = prepared.parts, prepared.room
    choice = warmed(settings, prepared, progress, registry)
    executors = dict(choice.executors)
    if isinstance(parts.group, FirstRank):
        executors = parts.group.lead(choice)
    config, placement = parts.model.config, parts.model.placement
    info = ModelInfo(
        architecture=config.architecture,
        weight_format=prepared.weight_format,
        dtype=str(placement.dtype).removeprefix("torch."),
        kv_dtype=str(parts.pool.stored).removeprefix("torch."),
        device=_device_name(placement.device),
        decoder=choice.decoder,
        objections=choice.objections,
        vocab_size=config.vocab_size,
        max_context=room.max_context,
        max_sequences=parts.max_sequences,
        max_batch_tokens=parts.max_batch_tokens,
        page_size=PAGE_SIZE,
        total_pages=room.pages,
        weights_bytes=prepared.weights_bytes,
        weights_digest=prepared.digest,
        lookahead_tokens=max(executor.lookahead_tokens for executor in executors.values()),
        max_tokens_per_row=max(executor.max_tokens_per_row for executor in executors.values()),
        unused=unused(choice),
        proposers=proposers_of(choice, parts),
        draft_model=Path(settings.draft_model).resolve().name if settings.draft_model else "",
    )
    runner = ModelRunner(info, parts, executors)
    for name in SWITCHES:
        if not getattr(settings, name):
            runner.set_optimization(name, False)
    return runner


def warmed(
    settings: EngineSettings,
    prepared: PreparedModel,
    progress: Progress,
    registry: tuple[ExecutorEntry, ...] = EXECUTORS,
) -> ExecutorChoice:
    """Chooses executors and warms them; those of captured steps on all ranks of a split model together. Raises
    Unsupported where the decoder asked for cannot serve."""
    parts, split = prepared.parts, prepared.split
    choice = choose(settings.decoder, parts, registry)
    # On a CPU all but one decoder are passed over, as users expect.
    level = logging.DEBUG if parts.model.placement.device.type == "cpu" else logging.INFO
    for objection in choice.objections:
        _log.log(level, "decoder %s passed over: %s", objection.decoder, objection.reason)
    for objection in choice.missing:
        _log.warning("decoder %s runs without %s: %s", choice.decoder, objection.decoder, objection.reason)
    captured = split is not None and split.sums is not None
    if split is not None and captured:
        split.agree(f"{choice.decoder}: {', '.join(name for name, _ in choice.executors)}")
    # What eager's executors do at the start reaches the other ranks as orders.
    if split is None or split.others is not None or (captured and choice.decoder == "graph"):
        for _, executor in choice.executors:
            executor.warmup(progress)
    parts.gpu.close()
    return choice


def _batch_tokens(config: ModelConfig, device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_BATCH_TOKENS
    attention = config.hidden_size * config.head_dim * 2 * (config.heads + config.kv_heads)
    weights = config.layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    return batch_tokens(weights, operations_per_second(device))


def _device_name(device: torch.device) -> str:
    return f"cuda: {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"


def _no_room(folder: Path, device: torch.device, error: object) -> str:
    first = (str(error).splitlines() or [""])[0][:160]
    return f"{folder}: does not fit into the memory of {_device_name(device)} ({first}); use a smaller model or device"
