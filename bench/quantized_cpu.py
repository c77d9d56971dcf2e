"""Decode on a CPU by the form of the weights, in turns, greedy, one stream, in one process: a table, and one JSON line.

    python -m bench.quantized_cpu --hidden 2048 --rounds 7

The demo model's shape scaled to another hidden size, with random weights of the same spread in every form. What is
timed is the engine's own loop with its eager decoder. Needs transformers, which `bench.engine_cpu` compares with.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.about import device, revision
from bench.engine_cpu import Arm, measure, ours, with_threads
from engine.settings import EngineSettings
from engine.worker.build import build

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo" / "config.json"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
PEER = "bfloat16"


def scaled(hidden: int) -> dict[str, Any]:
    """The demo model's config, wider."""
    config: dict[str, Any] = json.loads(DEMO.read_text())
    times = hidden // config["hidden_size"]
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        config[name] *= times
    return config


def settings_of(folder: Path, hidden: int, threads: int) -> dict[str, EngineSettings]:
    """One engine a form."""
    config = scaled(hidden)
    for name, section in (("plain", None), ("awq", AWQ)):
        (folder / name).mkdir()
        held = config if section is None else {**config, "quantization_config": section}
        (folder / name / "config.json").write_text(json.dumps(held))
    plain = EngineSettings(
        model=str(folder / "plain"),
        device="cpu",
        decoder="eager",
        load_format="dummy",
        threads=threads,
        max_sequences=1,
        max_context=256,
    )
    four = replace(plain, model=str(folder / "awq"))
    return {
        "float32": replace(plain, dtype="float32"),
        PEER: replace(plain, dtype="bfloat16"),
        "W4A16": four,
        "W4A16, all else bfloat16": replace(four, dtype="bfloat16"),
        "W8A16": replace(plain, quantization="int8"),
        "W8A16, all else bfloat16": replace(plain, quantization="int8", dtype="bfloat16"),
    }


def arms(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, Arm], dict[str, int]]:
    """What takes turns, and the bytes of its weights."""
    found: dict[str, Arm] = {}
    sizes: dict[str, int] = {}
    for name, settings in settings_of(folder, arguments.hidden, arguments.threads).items():
        runner = build(settings, lambda stage, done, total: None)
        prompt = torch.randint(
            0, runner.info.vocab_size, (arguments.prompt,), generator=torch.Generator().manual_seed(0)
        ).tolist()
        found[name] = with_threads(arguments.threads, partial(ours, runner, [prompt], arguments.tokens))
        sizes[name] = runner.info.weights_bytes
    return found, sizes


def report(rates: dict[str, list[float]], sizes: dict[str, int], arguments: argparse.Namespace) -> dict[str, Any]:
    """Prints the table; returns what the JSON line holds."""
    print(f"{'tokens/s':28} {'median':>8} {'best':>8} {'of bfloat16':>12} {'of float32':>11} {'MiB':>7}")
    figures = {}
    for name, values in rates.items():
        # Turns lie side by side, so that a busy machine slows both sides of a pair.
        ratios = {
            f"of_{peer}": statistics.median(one / two for one, two in zip(values, rates[peer], strict=True))
            for peer in (PEER, "float32")
        }
        figures[name] = {
            "median": statistics.median(values),
            "best": max(values),
            **ratios,
            "weights_bytes": sizes[name],
        }
        row = figures[name]
        print(
            f"{name:28} {row['median']:8.2f} {row['best']:8.2f} {ratios[f'of_{PEER}']:11.2f}x "
            f"{ratios['of_float32']:10.2f}x {sizes[name] / 2**20:7.0f}"
        )
    return {
        "bench": "quantized_cpu",
        "sha": revision(),
        "device": device(),
        "torch": torch.__version__,
        "settings": {
            "hidden": arguments.hidden,
            "threads": arguments.threads,
            "tokens": arguments.tokens,
            "prompt": arguments.prompt,
        },
        "rounds": arguments.rounds,
        "tokens_per_second": figures,
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hidden", type=int, default=2048, help="a multiple of the demo model's")
    parser.add_argument("--tokens", type=int, default=16, help="new tokens a turn")
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="torch's")
    return parser.parse_args(argv)


def main() -> None:
    """Measures and prints."""
    arguments = parse()
    with tempfile.TemporaryDirectory() as folder:
        found, sizes = arms(arguments, Path(folder))
        rates = measure(found, arguments.rounds)
    print(json.dumps(report(rates, sizes, arguments)))


if __name__ == "__main__":
    main()
