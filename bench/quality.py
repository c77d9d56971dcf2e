r"""Measures what quantizing costs, in one table: folders made by any quantizer, and rounding to nearest, against their
base.

    python -m bench.quality --base models/demo --text held-out.txt --nearest 32 64 128 \
        --folders ours-32=OUT theirs-32=OTHER

All read the same windows of the text in float32 arithmetic; `quant.evaluate` measures. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from bench import workloads as texts
from bench.result import ROOT, Result, Samples, device, revision, run_one_of, summary
from engine.errors import EngineFailed
from engine.execution.step_state import Parts
from engine.model.attention import RowSpan, StepAttention
from engine.model.transformer import StepInput
from engine.settings import PAGE_SIZE, Device, Dtype, EngineSettings, KvDtype, Quantization
from engine.worker.build import prepare
from quant import metrics
from quant.calibration import text_windows
from quant.checkpoint.awq import write_gemm
from quant.checkpoint.reading import read_config
from quant.checkpoint.safetensors import Checkpoint
from quant.checkpoint.tensors import layer_linears, layer_prefix
from quant.decoder import Decoder
from quant.evaluate import Evaluation, evaluate
from quant.recipes import AwqRecipe
from quant.rounding import round_groups
from quant.sensitivity import uniform

HEAD = f"{'':<16} {'perplexity':>10} {'change':>8} {'95 %':>18} {'KL':>8} {'top-1':>7} {'greedy':>7}"


def nearest(base: Path, out: Path, group: int) -> Path:
    """Rounds every linear of `base`'s layers to nearest, in the layout that `quant` reads."""
    source, decoder = Checkpoint(base), Decoder.open(base)
    packed = {
        f"{layer_prefix(i)}.{name}" for i in range(decoder.config.layers) for name in layer_linears(decoder.config)
    }
    tensors: dict[str, torch.Tensor] = {}
    for name in source.names():
        layer, tensor = name.removesuffix(".weight"), source.tensor(name)
        if layer in packed:
            rounded = write_gemm(round_groups(tensor, group))
            tensors |= {f"{layer}.{stem}": part.contiguous() for stem, part in rounded.items()}
        else:
            tensors[name] = tensor.half()
    out.mkdir()
    save_file(tensors, out / "model.safetensors")
    config = AwqRecipe(decoder, uniform(group), torch.empty(0), torch.empty(0)).config(read_config(base))
    (out / "config.json").write_text(json.dumps(config))
    shutil.copyfile(base / "tokenizer.json", out / "tokenizer.json")
    return out


def line(name: str, found: Evaluation) -> str:
    against = found.comparison
    if against is None:
        return f"{name:<16} {found.perplexity:10.3f}"
    change = against.perplexity_change
    interval = f"{change.low:+.2%} … {change.high:+.2%}"
    return (
        f"{name:<16} {found.perplexity:10.3f} {change.value:+8.2%} {interval:>18} {against.kl:8.5f} "
        f"{against.agreement:7.2%} {against.greedy:4.1f}/{against.greedy_of}"
    )


def folders(options: argparse.Namespace, work: Path) -> Iterator[tuple[str, Path]]:
    """Folders to measure, by the name that their row has."""
    for group in options.nearest:
        yield f"nearest-{group}", nearest(options.base, work / f"nearest-{group}", group)
    for given in options.folders:
        name, _, folder = given.partition("=")
        yield name, Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=160)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--nearest", type=int, nargs="*", default=[], metavar="GROUP")
    parser.add_argument("--folders", nargs="*", default=[], metavar="NAME=FOLDER")
    options = parser.parse_args()
    windows = text_windows(options.base, options.text, options.length, options.windows)
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figures: dict[str, object] = {}
    print(HEAD)
    with tempfile.TemporaryDirectory() as work:
        for name, folder in folders(options, Path(work)):
            found = evaluate(folder, windows, options.base, lambda *_: None, place)
            figures[name] = asdict(found)
            print(line(name, found), flush=True)
    about = {"commit": revision(), "device": device(), "base": options.base.name, "text": options.text.name}
    print(json.dumps({**about, "figures": figures}))


def read(parts: Parts, ids: torch.Tensor) -> torch.Tensor:
    """Logits [length - 1, vocabulary] of what follows each token of a window but the last."""
    places = torch.arange(len(ids), device=ids.device)
    span = RowSpan(0, len(ids), 0, list(range(-(-len(ids) // PAGE_SIZE))))
    windows = tuple(dict.fromkeys(parts.model.config.windows))
    attention = StepAttention([span], windows, parts.pool, ids.device)
    hidden = parts.model.forward(StepInput(ids, places, places, attention, None), parts.pool)
    return parts.model.logits(hidden[:-1])


def opened(given: argparse.Namespace, kept: KvDtype, quantization: Quantization = "auto") -> Parts:
    """Opens the model with keys and values of type `kept`."""
    settings = EngineSettings(
        model=str(given.model),
        device=given.device,
        dtype=given.dtype,
        max_sequences=1,
        max_context=given.length,
        kv_dtype=kept,
        quantization=quantization,
    )
    return prepare(settings, lambda *_: None).parts


def windows_of(model: Path, length: int, most: int) -> torch.Tensor:
    """Shape: int64 [windows, length]."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = [token for text in texts.modules().values() for token in tokenizer.encode(text).ids]
    count = min(most, len(ids) // length)
    return torch.tensor(ids[: count * length]).view(count, length)


def largest(parts: Parts) -> list[float]:
    """Returns the largest of the keys and of the values of the last window."""
    layers = range(parts.pool.shape.layers)
    pages = torch.arange(parts.pool.pages, device=parts.model.placement.device)
    return [max(float(parts.pool.gather(layer, pages)[part].abs().max()) for layer in layers) for part in (0, 1)]


FORMS: dict[str, dict[str, Any]] = {
    "8-bit weights": {"quantization": "int8"},
    "fp8 keys and values": {"kv_dtype": "fp8"},
}


def command(argv: Sequence[str] | None = None) -> Result:
    """Measures what fewer bits cost this model, each made while loading: perplexity of text that it never saw, the
    distance from its own distribution, and how often the likeliest token is the same."""
    parser = argparse.ArgumentParser(prog="whippet bench quality", description=summary(command))
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "demo", help="a folder with tokenizer.json")
    parser.add_argument("--device", choices=get_args(Device), default="auto")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="auto")
    parser.add_argument("--windows", type=int, default=24, help="at most")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    given = parser.parse_args(argv)
    if not (given.model / "tokenizer.json").is_file():
        raise ValueError(f"{given.model}: quality reads a folder with tokenizer.json")
    windows = windows_of(given.model, given.length, given.windows)
    base, figures, samples = opened(given, "auto"), dict[str, Any](), dict[str, Samples]()
    for name, changes in FORMS.items():
        try:
            other = opened(given, changes.get("kv_dtype", "auto"), changes.get("quantization", "auto"))
        except EngineFailed as error:
            figures[name] = {"left_out": str(error)}
            continue
        figures[name] = one = distance(base, other, windows)
        samples[f"{name}, perplexity"] = Samples("nats", tuple(one.pop("losses")))
        print(f"{name:22} " + ", ".join(f"{key} {value}" for key, value in one.items()), flush=True)
    return Result("quality", {**vars(given), "model": given.model.name}, {"forms": figures}, samples)


def distance(base: Parts, other: Parts, windows: torch.Tensor) -> dict[str, Any]:
    """Measures the distance of two forms of one model, over the same windows."""
    losses: list[list[float]] = [[], []]
    kl = same = 0.0
    with torch.inference_mode():
        for ids in windows.to(base.model.placement.device):
            found = [read(parts, ids).float() for parts in (base, other)]
            for held, logits in zip(losses, found, strict=True):
                held.append(float(metrics.negative_log_likelihood(logits, ids[1:]).mean()))
            kl += float(metrics.kl_divergence(*found).mean())
            same += float(metrics.agreement(*found).float().mean())
    one, two = (torch.tensor(held, dtype=torch.float64) for held in losses)
    change = metrics.perplexity_change(one, two)
    return {
        "perplexity": [round(metrics.perplexity(each), 4) for each in (one, two)],
        "change_percent": [round(100 * value, 3) for value in (change.value, change.low, change.high)],
        "kl": round(kl / len(windows), 6),
        "agreement": round(same / len(windows), 4),
        "losses": losses[1],
    }


def kept_main(argv: Sequence[str] | None = None) -> int:
    """Measures what fp8 keys and values cost in quality: a trained model reads text that it never saw, twice.

        python -m bench.quality kept --model models/demo

    Windows of held-out modules (`bench.workloads`), each read as one chunk, so that every token sees keys and values as
    they are kept; arithmetic in --dtype both times. Prints the perplexities, the distance between the two distributions
    (KL, in nats), how often their likeliest tokens are the same, and the largest key and value. Ends in one JSON line.
    """
    parser = argparse.ArgumentParser(description=summary(kept_main))
    parser.add_argument("--model", type=Path, default=Path("models/demo"))
    parser.add_argument("--device", choices=get_args(Device), default="auto")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="auto")
    parser.add_argument("--windows", type=int, default=160, help="at most")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--revision", help="the commit, where git is not")
    given = parser.parse_args(argv)
    plain, narrow = opened(given, "auto"), opened(given, "fp8")
    losses: list[list[float]] = [[], []]
    distance = same = 0.0
    windows = windows_of(given.model, given.length, given.windows)
    with torch.inference_mode():
        for ids in windows.to(plain.model.placement.device):
            found = [read(parts, ids) for parts in (plain, narrow)]
            for held, logits in zip(losses, found, strict=True):
                held.append(float(metrics.negative_log_likelihood(logits, ids[1:]).mean()))
            distance += float(metrics.kl_divergence(*found).mean())
            same += float(metrics.agreement(*found).float().mean())
        most = largest(plain)
    base, changed = (torch.tensor(held, dtype=torch.float64) for held in losses)
    change = metrics.perplexity_change(base, changed)
    record = {
        "bench": "kept",
        "revision": given.revision or revision(),
        "device": device(),
        "model": given.model.name,
        "dtype": str(plain.model.placement.dtype).removeprefix("torch."),
        "tokens": windows[:, 1:].numel(),
        "perplexity": [round(metrics.perplexity(each), 4) for each in (base, changed)],
        "perplexity_change": [change.value, change.low, change.high],
        "kl": distance / len(windows),
        "agreement": same / len(windows),
        "largest": most,
    }
    for name in ("tokens", "perplexity", "perplexity_change", "kl", "agreement", "largest"):
        print(f"{name:>18} {record[name]}")
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(run_one_of(main, kept=kept_main))
