"""Compares decode on a CPU with transformers' generate(), in turns, greedy, in one process: a table, and one JSON line.

    python -m bench.engine_cpu --model models/demo --rounds 7

Both decode the same prompts; a rate counts the tokens after the first. transformers runs in float32 and bfloat16, with
one thread and with all cores, and the fastest is the one compared with. Needs transformers, a test dependency.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from bench.pace import asked, planner
from bench.result import device, revision, run_one_of, summary
from engine.execution.runner import ModelRunner
from engine.kv.page_pool import PagePool
from engine.settings import EngineSettings
from engine.worker.build import build

STREAMS = (1, 8, 16, 64)  # at once; as many as the engine takes unless set otherwise
Arm = Callable[[], float]  # one turn → tokens per second


class Clock(BaseStreamer):
    """Notes when each token came; the prompt comes first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def theirs(model: Any, prompt: list[int], tokens: int) -> float:
    clock = Clock()
    with torch.inference_mode():
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
            streamer=clock,
        )
    first, last = clock.times[1], clock.times[-1]
    return (len(clock.times) - 2) / (last - first)


def ours(runner: ModelRunner, prompts: list[list[int]], tokens: int) -> float:
    """Times the engine's own loop without its socket from where all streams decode: plan, run, commit."""
    scheduler = planner(runner, PagePool(runner.info.total_pages))
    for key, prompt in enumerate(prompts):
        scheduler.admit(asked(key, tuple(prompt), tokens))
    done, begin = 0, 0.0
    while (plan := scheduler.plan(0.0)) is not None:
        counted = all(row.count == 1 for row in plan.rows) and len(plan.rows) == len(prompts)
        if counted and not begin:
            begin = time.perf_counter()
        scheduler.commit(plan, runner.run(plan), 0.0)
        done += len(plan.rows) if begin else 0
    return done / (time.perf_counter() - begin)


def arms(arguments: argparse.Namespace) -> dict[str, Arm]:
    tokens = arguments.tokens
    cores = torch.get_num_threads()
    settings = EngineSettings(model=arguments.model, device="cpu", threads=arguments.threads)
    runner = build(settings, lambda stage, done, total: None)
    own = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    shape = (max(STREAMS), arguments.prompt)
    prompts = torch.randint(0, runner.info.vocab_size, shape, generator=generator).tolist()
    found: dict[str, Arm] = {}
    for count in STREAMS:
        name = f"whippet, {own} threads, {count} stream{'s' if count > 1 else ''}"
        found[name] = with_threads(own, partial(ours, runner, prompts[:count], tokens))
    for name in ("float32", "bfloat16"):
        model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, name))
        model.eval()
        turn = partial(theirs, model, prompts[0], tokens)
        for threads in sorted({1, cores}):
            found[f"transformers {name}, {threads} threads, 1 stream"] = with_threads(threads, turn)
    return found


def with_threads(threads: int, turn: Arm) -> Arm:
    def run() -> float:
        torch.set_num_threads(threads)
        return turn()

    return run


def measure(found: dict[str, Arm], rounds: int) -> dict[str, list[float]]:
    """Runs each arm once to warm up, then `rounds` times each, interleaved."""
    rates: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(rounds + 1):
        for name, arm in found.items():
            rate = arm()
            if turn:
                rates[name].append(rate)
    return rates


def report(rates: dict[str, list[float]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Prints the table; returns what the JSON line holds."""
    best = {name: max(values) for name, values in rates.items()}
    middle = {name: statistics.median(values) for name, values in rates.items()}
    print(f"{'tokens/s':44} {'median':>9} {'best':>9}")
    for name in rates:
        print(f"{name:44} {middle[name]:9.1f} {best[name]:9.1f}")
    peer = max((name for name in rates if name.startswith("transformers")), key=lambda name: middle[name])
    ratios = {
        f"{name} / {peer}": {
            # Turns lie side by side, so that a busy machine slows both sides of a pair.
            "median": statistics.median(one / two for one, two in zip(values, rates[peer], strict=True)),
            "best": best[name] / best[peer],
        }
        for name, values in rates.items()
        if name.startswith("whippet")
    }
    for name, ratio in ratios.items():
        print(f"{name}: {ratio['median']:.2f}x (of the best turns {ratio['best']:.2f}x)")
    return {
        "bench": "engine_cpu",
        "sha": revision(),
        "device": device(),
        "torch": torch.__version__,
        "settings": {"model": Path(arguments.model).name, "tokens": arguments.tokens, "prompt": arguments.prompt},
        "rounds": arguments.rounds,
        "tokens_per_second": {name: {"median": middle[name], "best": best[name]} for name in rates},
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="models/demo")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a stream and turn")
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="the engine's; its own choice by default")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    line = report(measure(arms(arguments), arguments.rounds), arguments)
    print(json.dumps(line))


DEMO = Path(__file__).resolve().parents[1] / "models" / "demo" / "config.json"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
PEER = "bfloat16"


def scaled(hidden: int) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(DEMO.read_text())
    times = hidden // config["hidden_size"]
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        config[name] *= times
    return config


def settings_of(folder: Path, hidden: int, threads: int) -> dict[str, EngineSettings]:
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


def quantized_arms(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, Arm], dict[str, int]]:
    """Returns the arms, and the bytes of their weights."""
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


def quantized_report(
    rates: dict[str, list[float]], sizes: dict[str, int], arguments: argparse.Namespace
) -> dict[str, Any]:
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
    parser = argparse.ArgumentParser(description=summary(quantized_main))
    parser.add_argument("--hidden", type=int, default=2048, help="a multiple of the demo model's")
    parser.add_argument("--tokens", type=int, default=16, help="new tokens a turn")
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="torch's")
    return parser.parse_args(argv)


def quantized_main() -> None:
    """Compares decode on a CPU by the form of the weights, in turns, greedy, one stream, in one process: a table, and
    one JSON line.

        python -m bench.engine_cpu quantized --hidden 2048 --rounds 7

    The demo model's shape scaled to another hidden size, with random weights of the same spread in every form. What is
    timed is the engine's own loop with its eager decoder. Needs transformers, which `bench.engine_cpu` compares with.
    """
    arguments = parse()
    with tempfile.TemporaryDirectory() as folder:
        found, sizes = quantized_arms(arguments, Path(folder))
        rates = measure(found, arguments.rounds)
    print(json.dumps(quantized_report(rates, sizes, arguments)))


if __name__ == "__main__":
    sys.exit(run_one_of(main, quantized=quantized_main))
