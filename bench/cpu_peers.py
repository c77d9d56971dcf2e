"""Compares decode on a CPU with llama.cpp at the same bits, in turns, greedy: a table, and one JSON line.

    python -m bench.cpu_peers --gguf SmolLM2-135M-Instruct.Q4_1.gguf --folder smollm2-bf16 --peer PEER/bin/python

`--folder` is the GGUF file converted to 16 bits (`whippet convert`); `--peer` an interpreter with llama-cpp-python, or
none. Its files in 16 and 8 bits are made of the same one, into `--work`. Ours runs twice in each round: with the
walk in C, and with torch's walk, which is what it was before. No engine speculates. The rate of a turn is that of the
step which a quarter of its steps are faster than, in both engines, so that a busy machine shows less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.pace import asked, planner
from bench.result import device, revision
from engine.cores import usable_cores
from engine.execution.runner import ModelRunner
from engine.kv.page_pool import PagePool
from engine.settings import EngineSettings
from engine.worker.build import build

STREAMS = (1, 8)
Figures = dict[str, float]
Arm = Callable[[], Figures]
Key = tuple[str, str, int]  # engine, format, streams


def ours(runner: ModelRunner, fused: bool, streams: int, prompt: int, tokens: int) -> Figures:
    """The engine's own loop without its socket, in steps in which all streams decode."""
    runner.set_optimization("fused_kernels", fused)
    generator = torch.Generator().manual_seed(streams)
    prompts = torch.randint(0, runner.info.vocab_size, (streams, prompt), generator=generator).tolist()
    scheduler = planner(runner, PagePool(runner.info.total_pages))
    began = time.perf_counter()
    for key, ids in enumerate(prompts):
        scheduler.admit(asked(key, tuple(ids), tokens))
    ended = [began]
    steps = []
    while (plan := scheduler.plan(0.0)) is not None:
        scheduler.commit(plan, runner.run(plan), 0.0)
        ended.append(time.perf_counter())
        if all(row.count == 1 for row in plan.rows) and len(plan.rows) == streams:
            steps.append(ended[-1] - ended[-2])
    return {"tokens_per_second": streams / undisturbed(steps), "ttft_ms": (ended[1] - began) * 1e3}


def undisturbed(steps: list[float]) -> float:
    """The step that a quarter of the steps are faster than: others on a busy machine were interrupted."""
    return sorted(steps)[len(steps) // 4]


class LlamaCppPeer:
    def __init__(self, python: str) -> None:
        script = Path(__file__).with_name("llama_peer.py")
        self._process = subprocess.Popen(
            [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, **request: object) -> Figures:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: Figures = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        self._process.communicate()


def runners(arguments: argparse.Namespace) -> dict[str, ModelRunner]:
    common: dict[str, Any] = {"device": "cpu", "speculation": False, "max_sequences": 8, "max_context": 1024}
    plain = EngineSettings(model=arguments.folder, threads=arguments.threads, **common)
    made = {
        "16 bits": plain,
        "8 bits": EngineSettings(**{**_fields(plain), "quantization": "int8"}),
        "4 bits": EngineSettings(**{**_fields(plain), "model": arguments.gguf}),
    }
    return {name: build(settings, lambda stage, done, total: None) for name, settings in made.items()}


def _fields(settings: EngineSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


def peer_files(peer: LlamaCppPeer, gguf: str, work: Path) -> dict[str, str]:
    """Returns the peer's files by format, and makes those that are missing."""
    found = {"4 bits": gguf}
    for name, kind in (("16 bits", "BF16"), ("8 bits", "Q8_0")):
        target = work / f"{Path(gguf).stem}.{kind}.gguf"
        if not target.exists():
            peer.ask(**{"from": gguf, "to": str(target), "type": kind})
        found[name] = str(target)
    return found


def arms(arguments: argparse.Namespace, peer: LlamaCppPeer | None) -> dict[Key, Arm]:
    made = runners(arguments)
    theirs = {} if peer is None else peer_files(peer, arguments.gguf, Path(arguments.work))
    found: dict[Key, Arm] = {}
    sizes = (arguments.prompt, arguments.tokens)
    for streams in STREAMS:
        for name, runner in made.items():
            found["walk in C", name, streams] = partial(ours, runner, True, streams, *sizes)
            found["walk of torch", name, streams] = partial(ours, runner, False, streams, *sizes)
            if peer is not None:
                request = {"model": theirs[name], "streams": streams, "prompt": sizes[0], "tokens": sizes[1]}
                found["llama.cpp", name, streams] = partial(peer.ask, **request, threads=arguments.threads)
    return found


def report(rounds: dict[Key, list[Figures]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Prints the table; returns what the JSON line holds."""
    rows = []
    print(f"{'':44} {'best':>8} {'median':>8} {'first token, ms':>16}")
    for (engine, name, streams), turns in rounds.items():
        rates, firsts = ([one[what] for one in turns] for what in ("tokens_per_second", "ttft_ms"))
        row = {
            "device": device(),
            "engine": engine,
            "format": name,
            "streams": streams,
            "tokens_per_second": round(max(rates), 1),
            "median": round(statistics.median(rates), 1),
            "ttft_ms": round(min(firsts), 1) if streams == 1 else None,  # ours comes with those of all streams
        }
        rows.append(row)
        title = f"{engine}, {name}, {streams} streams"
        print(f"{title:44} {max(rates):8.1f} {statistics.median(rates):8.1f} {min(firsts):16.1f}")
    settings = {"prompt": arguments.prompt, "tokens": arguments.tokens, "threads": arguments.threads}
    model = Path(arguments.gguf).stem.partition(".")[0]
    return {
        "bench": "cpu_peers",
        "sha": revision(),
        "model": model,
        "settings": settings,
        "rounds": len(next(iter(rounds.values()))),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--peer", help="an interpreter with llama-cpp-python")
    parser.add_argument("--work", default=".", help="where llama.cpp's files are made")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens a stream and turn")
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of each engine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, help="begin no round after this time")
    arguments = parser.parse_args()
    peer = LlamaCppPeer(arguments.peer) if arguments.peer else None
    found = arms(arguments, peer)
    began = time.monotonic()
    rounds: dict[Key, list[Figures]] = {key: [] for key in found}
    for turn in range(arguments.rounds + 1):  # the first warms up
        for key, arm in found.items():
            figures = arm()
            if turn:
                rounds[key].append(figures)
        print(f"round {turn} of {arguments.rounds}", file=sys.stderr, flush=True)
        if arguments.seconds and time.monotonic() - began > arguments.seconds and turn:
            break
    line = report(rounds, arguments)
    if peer is not None:
        peer.close()
    print(json.dumps(line))


if __name__ == "__main__":
    main()
