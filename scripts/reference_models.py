"""Writes docs/models.md from docs/models.yaml: by which path the engine would serve each public model in each format.
The engine itself is asked, over shapes alone, as at a start on an H100. Writes the table of GPUs in docs/deployment.md,
too: what `whippet doctor --gpu` says of some of the models."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from engine.errors import Unsupported
from engine.kernels.gpu import gpu_of
from engine.loading.formats import FolderFormat
from engine.settings import EngineSettings
from engine.worker.forecast import forecast
from engine.worker.gpu_plan import make_plan
from engine.worker.known_gpus import KnownGpu, known_gpu
from engine.worker.required_kernels import KernelQuery
from quant.checkpoint.config import ModelConfig, parse_config
from quant.checkpoint.errors import BadConfig
from quant.checkpoint.spec import AwqSpec
from scripts.cells import table
from scripts.figures import ROOT

FORMATS: Mapping[str, FolderFormat] = {
    "bf16": FolderFormat(None),
    "AWQ g128": FolderFormat(AwqSpec("gemm", 128)),
    "AWQ g64": FolderFormat(AwqSpec("gemm", 64)),
    "AWQ g32": FolderFormat(AwqSpec("gemm", 32)),
    "int8": FolderFormat(None, int8=True),
}
H100 = gpu_of((9, 0), 132, 227 << 10)
FUSED, EAGER, NONE = "fused", "eager", "–"
_BF16 = EngineSettings(model="", dtype="bfloat16")

HEAD = """# Which models are fast

`make docs` writes this page from `docs/models.yaml`, whose models have the shapes of public ones, by asking the engine
what it would serve them with on an H100; lint fails where the answer changes. `whippet doctor --model FOLDER` says the
same of a model that is here.

**fused**: our own kernels in captured graphs compute few rows, many rows and prompts. **portable**: captured graphs of
PyTorch's products beside kernels of our own. **eager**: PyTorch alone, many times slower. "no …": some kind of rows is
computed by eager. "unpacked": the kernels do not read the format in some of the model's shapes, whose weights are
therefore kept in bf16. **–**: the format does not exist for the model. A number stands for a reason below the table.
Folders in float16 are fused where `--dtype bfloat16` asks for that, else portable.
"""

# Of the table of GPUs: their names, and models with a format.
GPUS = ("rtx-3070", "rtx-3060", "l4", "rtx-4090", "a100-40", "h100")
PLANNED = (
    ("Qwen3 0.6B", "bf16"),
    ("Llama 3.2 3B", "bf16"),
    ("Llama 3.1 8B", "AWQ g128"),
    ("Llama 3.1 8B", "int8"),
    ("Llama 3.1 8B", "bf16"),
    ("Qwen3 14B", "AWQ g128"),
    ("Qwen2.5 32B", "AWQ g128"),
    ("Llama 3.1 70B", "AWQ g128"),
)
SECTION = re.compile(r"(<!-- gpus -->\n).*?(<!-- /gpus -->)", re.DOTALL)


@dataclass(frozen=True)
class PublicModel:
    name: str
    parameters: float  # billions, as published
    config: ModelConfig


@dataclass(frozen=True)
class Served:
    path: str
    reason: str  # why not fused, or not wholly; empty where it is


def public_models(root: Path) -> tuple[PublicModel, ...]:
    listed: list[dict[str, Any]] = yaml.safe_load((root / "docs" / "models.yaml").read_text("utf-8"))
    return tuple(
        PublicModel(one["name"], one["parameters"], parse_config(one["config"], one["name"])) for one in listed
    )


def served(config: ModelConfig, form: FolderFormat) -> Served:
    try:
        found = forecast(_BF16, KernelQuery(config, form, H100), kernels=False)
    except BadConfig as error:
        if error.field != "group_size":
            raise
        return Served(NONE, "the model's inputs are not whole groups")
    choice = found.choice
    if choice.objections:
        return Served(choice.decoder, "; ".join(one.reason for one in choice.objections))
    unpacked = ", unpacked" if form.in_memory is not None and found.has_plain_layers else ""
    lacking = ", ".join(f"no {one.decoder}" for one in choice.missing)
    reasons = "; ".join(dict.fromkeys(one.reason for one in choice.missing))
    return Served(f"{FUSED}{unpacked}{lacking and f', {lacking}'}", reasons)


@functools.cache
def models_page(root: Path) -> str:
    reasons: list[str] = []
    rows = list(_rows(public_models(root), reasons))
    numbered = "".join(f"{number}. {reason}\n" for number, reason in enumerate(reasons, 1))
    return f"{HEAD}\n{table(['model', 'parameters, billions', *FORMATS], rows)}\n{numbered}"


def _rows(models: Sequence[PublicModel], reasons: list[str]) -> Iterator[list[str]]:
    for model in models:
        cells = []
        for form in FORMATS.values():
            found = served(model.config, form)
            if found.reason and found.reason not in reasons:
                reasons.append(found.reason)
            cells.append(f"{found.path} ({reasons.index(found.reason) + 1})" if found.reason else found.path)
        yield [model.name, f"{model.parameters:g}", *cells]


@functools.cache
def gpus_table(root: Path) -> str:
    configs = {one.name: one.config for one in public_models(root)}
    known = [known_gpu(name) for name in GPUS]
    head = ["", *(f"{one.title}, {round(one.memory_mib / 1024)} GB, {one.architecture}" for one in known)]
    return table(
        head, ([f"{name}, {form}", *(planned(configs[name], form, gpu) for gpu in known)] for name, form in PLANNED)
    )


def planned(config: ModelConfig, form: str, gpu: KnownGpu) -> str:
    try:
        plan = make_plan(_BF16, config, FORMATS[form], gpu, kernels=False).plan
    except Unsupported:
        return NONE
    if plan.tokens_per_second is None:
        return plan.path
    return f"{float(f'{plan.tokens_per_second:.2g}'):,.0f} · {plan.tokens // 1000:,} k"


def deployment_page(root: Path) -> str:
    text = (root / "docs" / "deployment.md").read_text("utf-8")
    filled, count = SECTION.subn(lambda found: f"{found[1]}{gpus_table(root)}{found[2]}", text)
    if count != 1:
        raise ValueError("docs/deployment.md: one table of GPUs is expected between <!-- gpus --> and <!-- /gpus -->")
    return filled


def pages(root: Path) -> Mapping[str, str]:
    return {"docs/models.md": models_page(root), "docs/deployment.md": deployment_page(root)}


def stale(root: Path) -> list[str]:
    return [name for name, page in pages(root).items() if (root / name).read_text("utf-8") != page]


def main() -> None:
    for name, page in pages(ROOT).items():
        (ROOT / name).write_text(page, "utf-8")


if __name__ == "__main__":
    main()
