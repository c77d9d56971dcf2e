"""Reports what this machine would do with a model, without loading its weights: `python -m engine.worker.doctor` prints
it as JSON. A process of its own, because it imports torch and initialises the GPU."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import get_args

import torch

from engine.errors import EngineError, Unsupported
from engine.execution.registry import EXECUTORS, ExecutorEntry, leaders
from engine.execution.router import Role
from engine.execution.speculation.verify_executor import NO_DRAFT
from engine.execution.step_state import Parts
from engine.kv.kv_cache import KvCache, stored_as
from engine.linear import Placement
from engine.linear.products import NoProducts, open_products
from engine.loading.formats import FolderFormat, read_folder
from engine.loading.load import check, weights_digest
from engine.model.layers import few_rows_weights, portable
from engine.model.layers.cpu_walk import why_no_cpu_walk
from engine.model.rope import rope_tables
from engine.model.split import Part, own_config
from engine.model.transformer import SPLIT, Transformer, kv_shape
from engine.sampling.sampler import Sampler
from engine.settings import DecoderChoice, Device, Dtype, EngineSettings, KvDtype, Quantization
from engine.worker import hardware
from engine.worker.build import room_of_rank
from engine.worker.draft import read_draft
from engine.worker.gpu_plan import GpuPlan, make_plan
from engine.worker.known_gpus import known_gpu
from engine.worker.offers import SWITCHES, proposers, trial_of
from engine.worker.shapes import shape_weights
from engine.worker.splitting import pays, require_split
from quant.checkpoint.config import ModelConfig
from quant.checkpoint.digest import of_model, of_texts
from quant.checkpoint.errors import CheckpointError
from quant.checkpoint.formats import DENSE, FORMATS
from quant.checkpoint.tensors import dense_tensors


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    capability: str
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Option:
    name: str
    chosen: bool
    reason: str | None  # why it is not chosen; None where nothing stands against it


@dataclass(frozen=True, slots=True)
class ModelReport:
    architecture: str
    weight_format: str
    parameters: int
    weights_bytes: int  # in memory
    max_context: int  # tokens
    model_context: int  # tokens that the model was made for
    pages: int
    kv_bytes: int  # of all pages
    digest: str | None  # that `model-digest` may demand; None: not asked for


@dataclass(frozen=True, slots=True)
class RankReport:
    """The part of a split model that one of its processes holds."""

    rank: int
    heads: int  # of queries
    kv_heads: int
    channels: int  # of the MLP
    tokens: int  # of the vocabulary
    weights_bytes: int  # in memory


@dataclass(slots=True)
class DoctorReport:
    """`problems` keep a server from starting, `warnings` do not."""

    torch: str
    cuda: str | None  # version that torch was built for
    threads: int
    gpus: list[Gpu] = field(default_factory=list)
    device: str | None = None
    dtypes: list[Option] = field(default_factory=list)
    decoders: list[Option] = field(default_factory=list)
    optimizations: list[Option] = field(default_factory=list)  # that a model or a machine may not have
    formats: list[Option] = field(default_factory=list)
    proposers: list[Option] = field(default_factory=list)  # of speculative decoding
    model: ModelReport | None = None
    ranks: list[RankReport] = field(default_factory=list)  # of a model that is split
    plan: GpuPlan | None = None  # for a GPU that is not here
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON object. 1 where there are problems."""
    settings, digest, gpu = _asked(sys.argv[1:] if argv is None else argv)
    report = examine(settings, digest) if gpu is None else examine_gpu(settings, gpu)
    sys.stdout.write(json.dumps(asdict(report)) + "\n")
    return 1 if report.problems else 0


def _asked(argv: Sequence[str]) -> tuple[EngineSettings, bool, str | None]:
    parser = argparse.ArgumentParser(prog="python -m engine.worker.doctor", allow_abbrev=False)
    parser.add_argument("--model", default="")
    parser.add_argument("--device", default="auto", choices=get_args(Device))
    parser.add_argument("--dtype", default="auto", choices=get_args(Dtype))
    parser.add_argument("--quantization", default="auto", choices=get_args(Quantization))
    parser.add_argument("--kv-dtype", default="auto", choices=get_args(KvDtype))
    parser.add_argument("--decoder", default="auto", choices=get_args(DecoderChoice))
    parser.add_argument("--tensor-parallel", default=1, type=lambda word: word if word == "auto" else int(word))
    parser.add_argument("--draft-model", default="")
    parser.add_argument("--digest", action="store_true")
    parser.add_argument("--gpu")
    given = vars(parser.parse_args(argv))
    digest, gpu = given.pop("digest"), given.pop("gpu")
    return EngineSettings(**given), digest, gpu


def examine(settings: EngineSettings, digest: bool = False) -> DoctorReport:
    """Reports on the machine and on serving `settings.model`, if any; its digest reads all weights."""
    report = DoctorReport(torch=torch.__version__, cuda=torch.version.cuda, threads=torch.get_num_threads())
    try:
        report.gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
        device = hardware.pick_device(settings.device)
        report.device = device.type
        config, form = (
            read_folder(Path(settings.model), settings.quantization) if settings.model else (None, FolderFormat(None))
        )
        form = form.on(device.type)
        stated = None if config is None else config.dtype
        dtype = hardware.pick_dtype(settings.dtype, stated, device, hardware.cpu_features(), form.in_memory is not None)
        report.dtypes = _dtypes(device, dtype, settings)
        report.formats = _formats(None if config is None else form)
        parts = None if config is None else _parts(config, form, Placement(dtype, device), settings.kv_dtype)
        draft = None if config is None else _draft(settings, config, device)
        report.decoders = _decoders(settings, parts, device)
        ranks = hardware.pick_ranks(
            settings.tensor_parallel, device, lambda ranks: config is not None and pays(settings, config, form, ranks)
        )
        if config is not None and ranks > 1:
            report.ranks = _ranks(settings, config, form, ranks, dtype, device)
            if device.type == "cuda" and (reason := hardware.why_no_peers(ranks)) is not None:
                report.warnings.append(hardware.through_nccl(ranks, reason))
        if parts is not None:
            report.model = _model(settings, form, parts, draft, digest, report)
            report.optimizations = _switches(parts, report)
        chosen = next((one.name for one in report.decoders if one.chosen), None)
        report.proposers = _proposers(chosen, parts, draft)
        if not any(one.chosen for one in report.decoders):
            reasons = "; ".join(f"{one.name}: {one.reason}" for one in report.decoders)
            raise Unsupported(f"no decoder can serve this model here ({reasons})")
    except EngineError as error:
        report.problems.append(str(error))
    except RuntimeError as error:  # of a driver
        report.problems.append(" ".join(str(error).split())[:300])
    return report


def examine_gpu(settings: EngineSettings, name: str) -> DoctorReport:
    """Reports on serving `settings.model` on a GPU that is not here. Its config suffices; no other file is read."""
    report = DoctorReport(torch=torch.__version__, cuda=torch.version.cuda, threads=torch.get_num_threads())
    try:
        gpu = known_gpu(name)
        config, form = read_folder(Path(settings.model), settings.quantization)
        form = form.on("cuda")
        found = make_plan(settings, config, form, gpu)
    except EngineError as error:
        report.problems.append(str(error))
        return report
    except CheckpointError as error:  # shapes that the format cannot have
        report.problems.append(f"{settings.model}: {error}")
        return report
    choice, room = found.choice, found.room
    report.plan, report.device = found.plan, "cuda"
    report.dtypes = [Option(str(found.dtype).removeprefix("torch."), True, None)]
    report.formats = [Option(form.name, True, None)]
    report.decoders = [Option(one.decoder, False, one.reason) for one in choice.objections]
    report.decoders.append(Option(choice.decoder, True, None))
    if choice.decoder == "graph":
        report.optimizations = [Option("two_pass_head", found.why_one_pass is None, found.why_one_pass)]
    report.warnings = [f"{one.decoder} is missing: {one.reason}" for one in choice.missing]
    if room.lacking is not None:
        report.warnings.append(room.lacking)
    report.model = ModelReport(
        config.architecture,
        form.name,
        _parameters(config),
        found.weights_bytes,
        room.max_context,
        config.max_context,
        room.pages,
        room.nbytes,
        None,
    )
    return report


def _parameters(config: ModelConfig) -> int:
    return sum(_count(shape) for shape in dense_tensors(config).values())


def _gpu(index: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return Gpu(found.name, f"{found.major}.{found.minor}", total, free)


def _dtypes(device: torch.device, chosen: torch.dtype, settings: EngineSettings) -> list[Option]:
    return [
        Option(name, dtype == chosen, None if dtype == chosen else _dtype_reason(name, device, settings))
        for name, dtype in hardware.DTYPES.items()
    ]


def _dtype_reason(name: str, device: torch.device, settings: EngineSettings) -> str:
    if settings.dtype != "auto":
        return f"{settings.dtype} was asked for"
    if device.type == "cpu" and name == "float16":
        return "not the default on a CPU: --dtype float16 asks for it"
    if device.type == "cpu" and name == "bfloat16" and not hardware.cpu_features().bf16:
        return "this CPU has no bfloat16 arithmetic: --dtype bfloat16 asks for it all the same"
    return f"not what the model was saved in: --dtype {name} asks for it"


def _formats(form: FolderFormat | None) -> list[Option]:
    """Lists every format that is served, the folder's own by its full name."""
    if form is None:
        return [Option(name, False, None) for name in FORMATS]
    found = [Option(name, False, _format_reason(name, form)) for name in FORMATS if not _is(form, name)]
    return sorted([*found, Option(form.name, True, None)], key=lambda one: not one.chosen)


def _is(form: FolderFormat, family: str) -> bool:
    return form.name == family or form.name.startswith(f"{family}-")


def _format_reason(name: str, form: FolderFormat) -> str:
    if name == "int8" and form.spec is None:
        return "--quantization int8 asks for it"
    return "int8 was asked for" if form.int8 else "the folder holds other weights"


def _decoders(settings: EngineSettings, parts: Parts | None, device: torch.device) -> list[Option]:
    """Keeps the registry's order; without a model, decoders are for the tiny one that an entry is tried on."""
    found: list[Option] = []
    taken = False
    for entry in leaders(EXECUTORS):
        reason = entry.why_not(_trial(entry, device) if parts is None else parts)
        if settings.decoder not in ("auto", entry.decoder):
            reason = f"{settings.decoder} was asked for"
        chosen = reason is None and not taken
        if reason is None and taken:
            reason = "a better one can serve"
        taken = taken or chosen
        found.append(Option(entry.decoder, chosen, reason))
    return found


def _trial(entry: ExecutorEntry, device: torch.device) -> Parts:
    """The model that the entry is compared with eager on."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(trial_of(entry))))
        config, form = read_folder(Path(folder), "auto")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return _parts(config, form, Placement(dtype, device))


def _switches(parts: Parts, report: DoctorReport) -> list[Option]:
    graph = next((one for one in report.decoders if one.name == "graph"), None)
    if graph is None or not graph.chosen:
        why = "is not in this build" if graph is None else f"does not serve: {graph.reason}"
        reasons = {name: None if name == "speculation" else f"the graph decoder {why}" for name in SWITCHES}
        if any(one.chosen and one.name == "portable" for one in report.decoders):
            slow = portable.why_slow_attention(parts)
            report.warnings += [] if slow is None else [f"long contexts are slow with the portable decoder: {slow}"]
            reasons |= {"graphs": None, "fused_kernels": None, "speculation": reasons["graphs"]}
        elif report.ranks:
            reasons["fused_kernels"] = SPLIT
        elif report.device == "cpu":
            reasons["fused_kernels"] = why_no_cpu_walk(
                parts.model.config, _with_products(parts.model.placement, report)
            )
    else:
        reasons = {"two_pass_head": few_rows_weights.why_one_pass(parts)}
    return [Option(name, reasons.get(name) is None, reasons.get(name)) for name in SWITCHES]


def _with_products(placement: Placement, report: DoctorReport) -> Placement:
    """Adds a server's products, compiled now if they never were."""
    plain = any(one.chosen and one.name == DENSE for one in report.formats)
    if plain and placement.dtype == torch.float32:
        return placement
    try:
        return replace(placement, products=open_products(hardware.cpu_features().flags))
    except NoProducts:
        return placement


def _draft(settings: EngineSettings, config: ModelConfig, device: torch.device) -> Parts | None:
    """Raises InvalidModel or Unsupported for a draft model that would be refused."""
    if not settings.draft_model:
        return None
    read = read_draft(Path(settings.draft_model), Path(settings.model), config)
    check(read.folder, read.config, read.form)
    quantized = read.form.in_memory is not None
    dtype = hardware.pick_dtype(settings.dtype, read.config.dtype, device, hardware.cpu_features(), quantized)
    return _parts(read.config, read.form.on(device.type), Placement(dtype, device))


def _proposers(chosen: str | None, parts: Parts | None, draft: Parts | None) -> list[Option]:
    verifier = Role.VERIFY if chosen == "graph" else chosen if chosen == "eager" else None
    no_draft = NO_DRAFT if draft is None else None
    if parts is not None and draft is not None and verifier == Role.VERIFY:
        no_draft = few_rows_weights.why_not(draft)
    return [Option(one.name, not one.why_not, one.why_not or None) for one in proposers(verifier, no_draft)]


def _parts(config: ModelConfig, form: FolderFormat, placement: Placement, kept: KvDtype = "auto") -> Parts:
    """Enough for an executor's `why_not`: weights without memory, one page, one slot."""
    weights = shape_weights(config, form, placement.dtype, placement.device.type)
    model = Transformer(config, weights, rope_tables(config, 1, placement.device), placement)
    shape = kv_shape(config)
    stored = stored_as(kept, placement.activations.dtype)
    pool = KvCache(shape, 1, placement.activations, placement.device.type == "cpu", stored)
    return Parts(model, pool, Sampler(config.vocab_size, 1, placement.device), 1, config.max_context)


def _ranks(
    settings: EngineSettings,
    config: ModelConfig,
    form: FolderFormat,
    ranks: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[RankReport]:
    """Returns what each process of a split model holds. Raises Unsupported for one that cannot be split."""
    require_split(settings.model, config, form, ranks)
    found = []
    for part in (Part(rank, ranks, splits_vocabulary=device.type != "cuda") for rank in range(ranks)):
        tokens = part.vocabulary(config.vocab_size).size
        own = replace(own_config(config, part), vocab_size=tokens)
        size = shape_weights(own, form, dtype, device.type).nbytes
        found.append(RankReport(part.rank, own.heads, own.kv_heads, own.intermediate_size, tokens, size))
    return found


def _model(
    settings: EngineSettings,
    form: FolderFormat,
    parts: Parts,
    draft: Parts | None,
    digest: bool,
    report: DoctorReport,
) -> ModelReport:
    """Raises InvalidModel or Unsupported for what would keep it from being served. Adds warnings of shortages."""
    folder, config, placement = Path(settings.model), parts.model.config, parts.model.placement
    check(folder, config, form)
    size = sum(one.weights_bytes for one in report.ranks) or parts.model.weights.nbytes
    free = hardware.free_bytes(placement.device)
    if placement.device.type == "cuda":
        free *= len(report.ranks) or 1  # of all GPUs, about
    needed = size + (0 if draft is None else draft.model.weights.nbytes)
    if needed > free:
        raise Unsupported(f"{folder}: the weights take {needed} bytes, {free} are free; use a smaller model or device")
    own = parts.model.config if not report.ranks else own_config(config, Part(0, len(report.ranks)))
    beside = 0 if draft is None else draft.pool.shape.page_bytes(draft.model.placement.activations.dtype)
    sequences = settings.max_sequences or hardware.most_sequences(placement.device)
    ranks = len(report.ranks) or 1
    room = room_of_rank(settings, sequences, own, placement.activations, free - needed, beside, ranks)
    if room.lacking is not None:
        report.warnings.append(room.lacking)
    known = of_model(weights_digest(folder, form), of_texts(folder)) if digest else None
    return ModelReport(
        config.architecture,
        form.name,
        _parameters(config),
        size,
        room.max_context,
        config.max_context,
        room.pages,
        room.nbytes * ranks,
        known,
    )


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


if __name__ == "__main__":
    sys.exit(main())
