r"""What quantizing costs, in one table: folders made by any quantizer, and rounding to nearest, against their base.

    python -m bench.quality --base models/demo --text held-out.txt --nearest 32 64 128 \
        --folders ours-32=OUT theirs-32=OTHER

All read the same windows of the text in float32 arithmetic; `quant.evaluate` measures. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.about import device, revision
from quant.calibration import text_windows
from quant.checkpoint.awq import write_gemm
from quant.checkpoint.config import read_config
from quant.checkpoint.safetensors import Checkpoint
from quant.checkpoint.tensors import layer_linears, layer_prefix
from quant.decoder import Decoder
from quant.evaluate import Evaluation, evaluate
from quant.recipes import AwqRecipe
from quant.rounding import round_groups
from quant.sensitivity import uniform

HEAD = f"{'':<16} {'perplexity':>10} {'change':>8} {'95 %':>18} {'KL':>8} {'top-1':>7} {'greedy':>7}"


def nearest(base: Path, out: Path, group: int) -> Path:
    """`base` with every linear of its layers rounded to nearest, in the layout that `quant` reads."""
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
    config = AwqRecipe(decoder, uniform(group), torch.empty(0)).config(read_config(base))
    (out / "config.json").write_text(json.dumps(config))
    shutil.copyfile(base / "tokenizer.json", out / "tokenizer.json")
    return out


def line(name: str, found: Evaluation) -> str:
    """One row of the table."""
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
    """Measures one after another."""
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


if __name__ == "__main__":
    main()
