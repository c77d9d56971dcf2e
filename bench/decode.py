"""Measures one stream of one model: tokens a second, time a token, time to the first token, start and memory; in the
engine's own loop and, with --grpc, through a server on loopback as well.

    python -m bench.decode --model bench/models/qwen3-0.6b --load-format dummy --context 128 1024 8192 --tokens 512

Prints a table and ends in one JSON line. A rate counts the tokens after the first arrival, median of --rounds answers;
a token's time is its share of the gap to the arrival before. The roofline is the bytes a token must read, at the
bandwidth that one large read reaches on the GPU. CPU is processor time of all processes that serve, in cores.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from bench.pace import PacedAnswer, asked, figures, first_tokens, planner
from bench.result import Result, Samples, device, finish, gpu_bytes
from engine.api import GREEDY, ModelInfo, SamplingParams
from engine.execution.runner import ModelRunner
from engine.kv.page_pool import PagePool
from engine.settings import PAGE_SIZE, DecoderChoice, Device, Dtype, EngineSettings, KvDtype, LoadFormat, Quantization
from engine.worker.build import make_runner, prepare

BANDWIDTH = {"NVIDIA H100 80GB HBM3": 3.07}  # TB/s, one kernel over 880 MB
FIRST_PROMPT = 128  # tokens
Generate = Callable[[Sequence[int], int], PacedAnswer]  # prompt and tokens → answer


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes that a token must read."""

    weights: int  # bytes, once a token
    held: int  # bytes of keys and values, once a token of context

    def bytes_at(self, context: float) -> int:
        """Returns the bytes with `context` tokens before it."""
        return self.weights + int(self.held * context)


class EngineArm:
    """Runs the engine's loop without its socket: plan, run, commit."""

    def __init__(self, settings: EngineSettings, sampling: SamplingParams) -> None:
        began = time.monotonic()
        prepared = prepare(settings, _silent)
        self.loaded = time.monotonic() - began  # seconds
        self.runner: ModelRunner = make_runner(settings, prepared, _silent)
        self.started = time.monotonic() - began  # seconds
        model = prepared.parts.model
        table = 0 if model.config.tied_head else model.weights.embedding.nbytes
        width = 2 * model.config.layers * model.config.kv_heads * model.config.head_dim * model.placement.dtype.itemsize
        self.reading = Reading(model.weights.nbytes - table, width)
        self._sampling = sampling
        self._asked = 0

    def ask(self, prompt: Sequence[int], tokens: int) -> PacedAnswer:
        scheduler = planner(self.runner, PagePool(self.runner.info.total_pages))
        self._asked += 1
        answer, cpu = PacedAnswer(time.monotonic()), 0.0
        scheduler.admit(asked(self._asked, tuple(prompt), tokens, self._sampling))
        while (plan := scheduler.plan(0.0)) is not None:
            events = scheduler.commit(plan, self.runner.run(plan), 0.0)
            count = sum(len(event.token_ids) for event in events)
            if count:
                answer.arrivals.append((time.monotonic(), count))
                cpu = cpu or time.process_time()
        answer.cpu = time.process_time() - cpu
        if answer.tokens != tokens:
            raise RuntimeError(f"{answer.tokens} of {tokens} tokens came")
        return answer

    def close(self) -> None:
        self.runner.close()
        del self.runner
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _silent(stage: str, done: int, total: int) -> None:
    pass


def prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, vocabulary, (count, length), generator=generator).tolist()


def measure(ask: Generate, given: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
    rows: dict[int, dict[str, Any]] = {}
    for context in given.context:
        warm, *others = prompts(given.rounds + 1, context, vocabulary)
        ask(warm, given.tokens)
        answers = [ask(prompt, given.tokens) for prompt in others]
        rows[context] = {**figures(answers), "rates": [round(one.rate, 2) for one in answers]}
    warm, *others = prompts(given.first + 1, min(FIRST_PROMPT, given.longest - 2), vocabulary)
    ask(warm, 2)
    return {"contexts": rows, "first_token": first_tokens([ask(prompt, 2).first for prompt in others])}


def engine_settings(given: argparse.Namespace) -> EngineSettings:
    return EngineSettings(
        model=given.model,
        device=given.device,
        dtype=given.dtype,
        decoder=given.decoder,
        load_format=given.load_format,
        quantization=given.quantization,
        max_sequences=given.max_sequences,
        max_context=given.longest,
        kv_bytes=given.kv_bytes,
        kv_dtype=given.kv_dtype,
        threads=given.threads,
        tensor_parallel=1,
    )


def in_engine(given: argparse.Namespace, sampling: SamplingParams) -> dict[str, Any]:
    """Measures the engine itself, each figure with its share of the roofline where the GPU's bandwidth is known."""
    before = gpu_bytes()
    arm = EngineArm(engine_settings(given), sampling)
    info, reading = arm.runner.info, arm.reading
    found = measure(arm.ask, given, info.vocab_size)
    bandwidth = given.bandwidth or BANDWIDTH.get(device()) or (None if cuda_of(info) else read_rate())
    for context, row in found["contexts"].items():
        row["bytes"] = reading.bytes_at(context + given.tokens / 2)
        if bandwidth:
            row["roofline"] = round(row["bytes"] / (bandwidth * 1e12) * row["tokens_per_second"], 3)
    cuda = cuda_of(info)
    peak = torch.cuda.max_memory_reserved() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found |= {"decoder": info.decoder, "dtype": info.dtype, "weights": info.weight_format, "bandwidth": bandwidth}
    found |= {"load_s": round(arm.loaded, 2), "start_s": round(arm.started, 2), "peak_bytes": peak}
    found |= {"driver_bytes": _driver_bytes(before) if cuda else None}
    found |= {"objections": {one.decoder: one.reason for one in info.objections}, "vocabulary": info.vocab_size}
    arm.close()
    return found


def cuda_of(info: ModelInfo) -> bool:
    return info.device.startswith("cuda")


def read_rate() -> float:
    """Measures TB/s of all threads together that read 256 MiB of this machine's memory: the best of five. Weights that
    fit into the processor's caches can be read faster."""
    block, best = torch.ones(1 << 26), 0.0
    for _ in range(5):
        began = time.perf_counter()
        block.sum()
        best = max(best, block.nbytes / (time.perf_counter() - began) / 1e12)
    return round(best, 5)


def _driver_bytes(before: int | None) -> int | None:
    """Returns the driver's count of this process's bytes, code and all; where it counts none apart, how much more than
    before."""
    own, whole = gpu_bytes(os.getpid()), gpu_bytes()
    if own is not None or before is None or whole is None:
        return own
    return whole - before


def through_grpc(given: argparse.Namespace, sampling: SamplingParams, vocabulary: int) -> dict[str, Any]:
    from bench import own_server  # what a server needs beside torch may not be there

    flags = [f"--{name.replace('_', '-')}={getattr(given, name)}" for name in ("device", "dtype", "decoder")]
    flags += [f"--load-format={given.load_format}", f"--quantization={given.quantization}"]
    flags += [f"--scheduler.max-context={given.longest}", f"--scheduler.max-sequences={given.max_sequences}"]
    flags += [f"--kv-dtype={given.kv_dtype}"]
    flags += [] if given.kv_bytes is None else [f"--scheduler.kv-bytes={given.kv_bytes}"]
    flags += [] if given.threads is None else [f"--scheduler.threads={given.threads}"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = own_server.with_tokenizer(Path(given.model).resolve(), Path(scratch) / "model")
        with own_server.server([f"--model={folder}", *flags]) as running:
            found = measure(lambda prompt, tokens: own_server.ask(running, prompt, tokens, sampling), given, vocabulary)
            return {**found, "ready_s": round(running.seconds, 2)}


def at_target(given: argparse.Namespace) -> Result:
    from bench import own_server

    model = own_server.served_model(given.target, given.token)
    running = own_server.Remote(given.target, given.token)
    found = measure(
        lambda prompt, tokens: own_server.ask(running, prompt, tokens, GREEDY), given, model.limits.vocab_size
    )
    show("served", found)
    samples = {
        f"served, {at} tokens before": Samples("tokens/s", tuple(row.pop("rates")))
        for at, row in found["contexts"].items()
    }
    asked = {name: value for name, value in vars(given).items() if name != "token"}
    return Result("decode", {**asked, "model": model.name}, {"served": found}, samples)


def show(name: str, found: dict[str, Any]) -> None:
    print(f"{name:>9} {'context':>8} {'tok/s':>9} {'p50 µs':>9} {'p95':>9} {'p99':>9} {'CPU':>6} {'roofline':>9}")
    for context, row in found["contexts"].items():
        times = " ".join(f"{row[key]:9.1f}" for key in ("tokens_per_second", "us_p50", "us_p95", "us_p99"))
        roofline = f"{row['roofline']:9.1%}" if "roofline" in row else f"{'-':>9}"
        print(f"{'':9} {context:8} {times} {row['cpu']:6.2f} {roofline}")
    first = found["first_token"]
    print(f"{'':9} first token p50 {first['ms_p50']:.2f} ms, p95 {first['ms_p95']:.2f} ms", flush=True)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses flags; `longest` is the context that takes the longest prompt and its answer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="a folder; with --load-format dummy its config.json suffices")
    parser.add_argument("--target", metavar="HOST:PORT", help="a server that runs; nothing is measured but its streams")
    parser.add_argument("--token", default="", help="of a caller of that server")
    parser.add_argument("--load-format", choices=get_args(LoadFormat), default="auto")
    parser.add_argument("--quantization", choices=get_args(Quantization), default="auto")
    parser.add_argument("--decoder", choices=get_args(DecoderChoice), default="auto")
    parser.add_argument("--device", choices=get_args(Device), default="auto")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="auto")
    parser.add_argument("--context", type=int, nargs="+", default=[128], help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=512, help="new tokens an answer")
    parser.add_argument("--rounds", type=int, default=5, help="answers a context")
    parser.add_argument("--first", type=int, default=20, help="answers that the time to the first token is taken from")
    parser.add_argument("--grpc", action="store_true", help="measure a server's stream as well")
    parser.add_argument("--max-sequences", type=int, default=1)
    parser.add_argument("--kv-bytes", type=int, help="of the page pool; by default what the sequences need")
    parser.add_argument("--kv-dtype", choices=get_args(KvDtype), default="auto")
    parser.add_argument("--threads", type=int, help="on a CPU")
    for name, plain in (("temperature", 0.0), ("top-p", 1.0), ("min-p", 0.0), ("repetition-penalty", 1.0)):
        parser.add_argument(f"--{name}", type=float, default=plain)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--bandwidth", type=float, help="TB/s that the roofline stands on")
    parser.add_argument("--revision", help="the commit, where git is not")
    given = parser.parse_args(argv)
    if (given.model is None) == (given.target is None):
        parser.error("name a --model, or a --target that serves one")
    if given.tokens < 2 or given.rounds < 1 or given.first < 1:
        parser.error("--tokens must be 2 or more, --rounds and --first 1 or more")
    # Whole pages, and what is looked ahead beyond an answer.
    given.longest = -(-(max(given.context) + given.tokens) // PAGE_SIZE) * PAGE_SIZE + 2 * PAGE_SIZE
    return given


def command(argv: Sequence[str] | None = None) -> Result:
    given = arguments(argv)
    if given.target is not None:
        return at_target(given)
    sampling = SamplingParams(
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=7,
    )
    record: dict[str, Any] = {"torch": torch.__version__}
    found = record["engine"] = in_engine(given, sampling)
    show("engine", found)
    print(
        f"{'':9} {found['decoder']}, started in {found['start_s']} s, peak {found['peak_bytes'] / 1e9:.2f} GB", end=""
    )
    counted = found["driver_bytes"]
    print("" if counted is None else f", {counted / 1e9:.2f} GB as the driver counts")
    if given.grpc:
        served = record["served"] = through_grpc(given, sampling, found["vocabulary"])
        show("served", served)
        for context, row in served["contexts"].items():
            row["of_engine"] = round(row["tokens_per_second"] / found["contexts"][context]["tokens_per_second"], 3)
        print(f"{'':9} " + ", ".join(f"{row['of_engine']:.1%} at {at}" for at, row in served["contexts"].items()))
    rates = {
        f"{arm}, {at} tokens before": row.pop("rates")
        for arm in ("engine", "served")
        if arm in record
        for at, row in record[arm]["contexts"].items()
    }
    samples = {name: Samples("tokens/s", tuple(values)) for name, values in rates.items()}
    return Result("decode", vars(given), record, samples, given.revision or "")


def main(argv: Sequence[str] | None = None) -> int:
    return finish(command(argv))


if __name__ == "__main__":
    sys.exit(main())
