"""Quantizes a model folder layer by layer, so that one layer and the calibration text are all that memory holds."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch

from quant.calibration import SHIPPED, Windows, own_windows, split, text_windows
from quant.checkpoint.config import ModelConfig
from quant.checkpoint.errors import BadFile
from quant.checkpoint.formats import read_spec
from quant.checkpoint.reading import load_config, read_config
from quant.checkpoint.safetensors import Checkpoint
from quant.checkpoint.tensors import EMBEDDING, FINAL_NORM, HEAD, layer_linears, layer_norms, layer_prefix
from quant.decoder import Decoder
from quant.errors import CannotQuantize
from quant.evaluate import evaluate
from quant.job import QuantizeJob, job_key
from quant.packages import run_autoawq, run_bitsandbytes
from quant.progress import Progress
from quant.recipes import AwqRecipe, Int8Recipe, Recipe
from quant.report import QuantizeReport
from quant.sensitivity import BitPlan, least_bits, measure, plan, uniform

Target = Literal["awq", "int8"]
Engine = Literal["own", "autoawq", "bitsandbytes"]

DEFAULT_BUDGET: Final = 4.75  # bits a weight; more where a model has many inputs that no group divides
_GROUPS: Final = (128, 64, 32)  # what other readers of the layout take
_PACKAGE_FORMAT: Final[Mapping[str, Target]] = {"autoawq": "awq", "bitsandbytes": "int8"}
_OUTSIDE: Final = (EMBEDDING, FINAL_NORM, f"{HEAD}.weight")
_DERIVED: Final = re.compile(r"(model\.layers\.\d+\.self_attn\.|model\.)rotary_emb\.inv_freq")  # older files have it


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """budget: bits a weight, within which the linears that lose most have eight; None: none has. group: None takes
    within a budget the smallest that fits, or else the largest. With neither our own engine takes a budget of
    `DEFAULT_BUDGET`. text: calibration text; None: the one that ships. own_text: the model writes it instead. samples
    and held_out: windows of `length` tokens."""

    format: Target = "awq"
    engine: Engine = "own"
    group: int | None = None
    budget: float | None = None
    text: Path | None = None
    own_text: bool = False
    samples: int = 32
    held_out: int = 8
    length: int = 512
    seed: int = 0
    device: str = "cpu"


def quantize(model: Path, out: Path, options: QuantizeOptions, progress: Progress) -> QuantizeReport:
    """Makes `out`, or goes on with it where an earlier run was stopped. The source is never written to."""
    source = Checkpoint(model)
    options = _checked(source, options)
    decoder = Decoder.open(model, torch.device(options.device))
    about = _about(options)
    job = QuantizeJob.open(out, job_key(source, about))
    with torch.inference_mode():
        windows = _windows(decoder, source, options, job, progress)
    if not job.assembled:
        if options.engine == "own":
            _run_own(decoder, source, options, windows, job, progress)
        else:
            _run_package(model, out, options, windows)
            job.assembled_elsewhere()
    evaluation = evaluate(out, windows.held_out, model, progress, decoder.device)
    report = QuantizeReport(about, source.nbytes(), Checkpoint(out).nbytes(), job.layers, evaluation, job.noted("plan"))
    report.write(out)
    job.close()
    return report


@torch.inference_mode()
def _run_own(
    decoder: Decoder,
    source: Checkpoint,
    options: QuantizeOptions,
    windows: Windows,
    job: QuantizeJob,
    progress: Progress,
) -> None:
    outside = _outside(source, decoder.config)
    recipe = _recipe(decoder, source, options, windows, job, progress)
    _run_layers(recipe, decoder.config.layers, job, progress)
    rest = {name: recipe.plain(name, source.tensor(name)) for name in outside}
    job.assemble(rest, source.folder, recipe.config(read_config(source.folder)))


def _run_package(model: Path, out: Path, options: QuantizeOptions, windows: Windows) -> None:
    if options.engine == "autoawq":
        run_autoawq(model, out, _group(options), windows.calibration)
    else:
        run_bitsandbytes(model, out)


def _checked(source: Checkpoint, options: QuantizeOptions) -> QuantizeOptions:
    """The options, with a group where the format has any. Raises CannotQuantize before any work is done."""
    if read_spec(source.folder, source.names()) is not None:
        raise CannotQuantize(f"{source.folder.name} is quantized already: start from the original")
    if options.text is not None and options.own_text:
        raise CannotQuantize("a text that is given is not written: choose one of --text and --own-text")
    if options.engine != "own" and _PACKAGE_FORMAT[options.engine] != options.format:
        raise CannotQuantize(
            f"{options.engine} does not write {options.format}: it writes {_PACKAGE_FORMAT[options.engine]}"
        )
    if min(options.samples, options.held_out) < 1 or options.length < 2:
        raise CannotQuantize("calibration needs one window at least, so does judging; a window needs two tokens")
    return _sized(load_config(source.folder), options)


def _sized(config: ModelConfig, options: QuantizeOptions) -> QuantizeOptions:
    """The options, with a group or a budget where four bits are asked for."""
    if options.budget is not None and (options.format != "awq" or options.engine != "own"):
        raise CannotQuantize("a budget decides which linears of a 4-bit model stay in 8 bits: own engine, format awq")
    if options.format != "awq":
        return options
    if options.group is not None and options.group not in _GROUPS:
        raise CannotQuantize(f"groups of {options.group}: choose one of {', '.join(map(str, _GROUPS))}")
    if options.budget is None and (options.group is not None or options.engine != "own"):
        return replace(options, group=_fitting(config, options))
    least = least_bits(config, _groups(options))
    if options.budget is None:
        return replace(options, budget=max(DEFAULT_BUDGET, math.ceil(least * 100) / 100))
    if options.budget < least:
        raise CannotQuantize(f"a budget of {options.budget:g} bits a weight: this model takes {least:.2f} at least")
    return options


def _groups(options: QuantizeOptions) -> tuple[int, ...]:
    return _GROUPS if options.group is None else (options.group,)


def _within(config: ModelConfig, budget: float, groups: tuple[int, ...]) -> tuple[int]:
    """The group that a plan within the budget has, so that losses are measured for it alone."""
    return (min(group for group in groups if least_bits(config, (group,)) <= budget),)


def _fitting(config: ModelConfig, options: QuantizeOptions) -> int:
    """The group that was asked for, or else the largest that all linears divide into. Raises CannotQuantize."""
    linears = layer_linears(config)
    fitting = [group for group in _GROUPS if all(inputs % group == 0 for inputs, _ in linears.values())]
    if options.group in fitting:
        return options.group
    if fitting and options.group is None:
        return fitting[0]
    wanted = options.group or _GROUPS[-1]
    name, inputs = next((name, inputs) for name, (inputs, _) in linears.items() if inputs % wanted)
    instead = f"--group {fitting[0]}" if fitting else "--format int8"
    raise CannotQuantize(f"{name} has {inputs} inputs, not whole groups of {wanted}: {instead} fits this model")


def _group(options: QuantizeOptions) -> int:
    if options.group is None:
        raise CannotQuantize("no group was chosen")
    return options.group


def _run_layers(recipe: Recipe, layers: int, job: QuantizeJob, progress: Progress) -> None:
    progress("layers", len(job.layers), layers)
    for index in range(len(job.layers), layers):
        start = time.monotonic()
        outcome = recipe.layer(index)
        record = {**outcome.record, "seconds": time.monotonic() - start}
        job.finish_layer(outcome.tensors, outcome.hidden, record)
        progress("layers", index + 1, layers)


def _recipe(
    decoder: Decoder,
    source: Checkpoint,
    options: QuantizeOptions,
    windows: Windows,
    job: QuantizeJob,
    progress: Progress,
) -> Recipe:
    if options.format == "int8":
        return Int8Recipe(decoder, source)
    hidden = job.hidden()
    if hidden is None:
        if job.layers:
            raise CannotQuantize("the unfinished job lost its calibration state: remove the folder and start again")
        hidden = decoder.embed(windows.calibration)
    bits, weights = _measured(decoder, options, windows, job, progress)
    return AwqRecipe(decoder, bits, hidden.to(decoder.device), weights)


def _measured(
    decoder: Decoder, options: QuantizeOptions, windows: Windows, job: QuantizeJob, progress: Progress
) -> tuple[BitPlan, torch.Tensor]:
    """Returns which linears have eight bits, and how much tokens count: from an earlier run of the job, or from the
    model's own answers."""
    noted, weights = job.noted("plan"), job.kept("weights")
    if noted is None or weights is None:
        groups = () if options.budget is None else _within(decoder.config, options.budget, _groups(options))
        found = measure(decoder, windows.calibration, groups, lambda done, total: progress("parts", done, total))
        budget, weights = options.budget, found.weights
        noted = asdict(uniform(_group(options)) if budget is None else plan(found.parts, budget, groups))
        job.keep("weights", weights)
        job.note("plan", noted)
    eight = {int(layer): tuple(names) for layer, names in noted["eight"].items()}
    return BitPlan(noted["group"], eight, noted["bits"]), weights


def _windows(
    decoder: Decoder, source: Checkpoint, options: QuantizeOptions, job: QuantizeJob, progress: Progress
) -> Windows:
    """Returns the windows of an earlier run of the job, or new ones."""
    calibration, held_out = job.kept("calibration"), job.kept("held_out")
    if calibration is not None and held_out is not None:
        return Windows(calibration, held_out)
    length = min(options.length, decoder.config.max_context)
    count = options.held_out + (options.samples if options.format == "awq" else 0)
    if options.own_text:
        drawn = own_windows(
            decoder,
            read_config(source.folder),
            length,
            count,
            options.seed,
            job,
            lambda done, total: progress("samples", done, total),
        )
    else:
        drawn = text_windows(source.folder, options.text or SHIPPED, length, count)
    if options.format == "int8":
        windows = Windows(drawn[:0], drawn)
    else:
        windows = split(drawn, min(options.held_out, max(1, len(drawn) // 5)))
    job.keep("calibration", windows.calibration)
    job.keep("held_out", windows.held_out)
    return windows


def _about(options: QuantizeOptions) -> dict[str, Any]:
    """The options that decide the result, for the report and the job's key."""
    about = {
        "format": options.format,
        "engine": options.engine,
        "group": options.group if options.format == "awq" else None,
        "budget": options.budget,
        "text": "written by the model" if options.own_text else _named(options.text or SHIPPED),
    }
    sizes = {"samples": options.samples, "held_out": options.held_out, "length": options.length, "seed": options.seed}
    return {**about, **sizes}


def _named(text: Path) -> str:
    try:
        return f"{text.name}, SHA-256 {hashlib.sha256(text.read_bytes()).hexdigest()[:16]}"
    except OSError as error:
        raise BadFile(text, error.strerror or "cannot be read", "give a text file") from error


def _outside(source: Checkpoint, config: ModelConfig) -> tuple[str, ...]:
    """The tensors outside layers; refuses a model with any that would be left behind."""
    layered = set(_layer_names(config))
    strangers = [
        name for name in source.names() if name not in layered and name not in _OUTSIDE and not _DERIVED.fullmatch(name)
    ]
    if strangers:
        raise CannotQuantize(f"the model has a tensor that its family does not: {min(strangers)}")
    return tuple(name for name in _OUTSIDE if name in source.names())


def _layer_names(config: ModelConfig) -> Iterator[str]:
    for index in range(config.layers):
        prefix = layer_prefix(index)
        for linear in layer_linears(config):
            yield from (f"{prefix}.{linear}.weight", f"{prefix}.{linear}.bias")
        yield from (f"{prefix}.{norm}.weight" for norm in layer_norms(config))
