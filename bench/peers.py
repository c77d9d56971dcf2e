"""Compares Whippet with other servers on this machine: the same model, the same prompts as token ids, the same lengths,
in turns.

    whippet bench peers --model FOLDER --streams 1 8

Each peer is a process of its own, loaded with all others and idle while they run. A rate is of the tokens after the
first: the time of a whole answer less the time of one token. What is not installed is named, with the command that
installs it. llama.cpp needs a GGUF file (`--gguf`, or the model itself); the others a folder.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.live import DEMO
from bench.redis_server import free_port
from bench.result import Result, Samples

_START = 600.0  # seconds that a peer may load and compile
Prompts = Sequence[Sequence[int]]


class Peer(Protocol):
    def generate(self, prompts: Prompts, tokens: int) -> None:
        """Answers all prompts at once with exactly `tokens` tokens, greedily."""


@dataclass(frozen=True, slots=True)
class PeerKind:
    """Finds, loads and installs a peer. `open` gets the model, the most streams and the most tokens."""

    name: str
    package: str
    install: str
    open: Callable[[str, int, int], Peer]
    gguf: bool = False

    def missing(self, model: str, gguf: str | None) -> str:
        """Returns why it cannot run here; empty where it can."""
        if self.name == "llama.cpp":
            if gguf is None:
                return "needs a GGUF file: --gguf FILE"
            if shutil.which("llama-server") or importlib.util.find_spec("llama_cpp"):
                return ""
            return self.install
        if not importlib.util.find_spec(self.package):
            return self.install
        return "needs a folder, not a GGUF file" if self.package != "engine" and Path(model).is_file() else ""

    def version(self) -> str:
        from importlib.metadata import PackageNotFoundError, version

        for name in (self.package, self.package.replace("_", "-"), "whippet-serve", "llama-cpp-python"):
            try:
                return version(name)
            except PackageNotFoundError:
                continue
        return ""


class Whippet:
    """Runs the engine's loop without its socket, as a server would set it up."""

    drafts = True

    def __init__(self, model: str, streams: int, tokens: int) -> None:
        from engine.settings import PAGE_SIZE, EngineSettings
        from engine.worker.build import build

        context = -(-(tokens + 32) // PAGE_SIZE) * PAGE_SIZE + 4 * PAGE_SIZE
        settings = EngineSettings(model=model, max_sequences=streams, max_context=context, speculation=self.drafts)
        self._runner = build(settings, lambda stage, done, total: None)
        gc.collect()
        gc.freeze()

    def generate(self, prompts: Prompts, tokens: int) -> None:
        from bench.pace import asked, planner
        from engine.kv.page_pool import PagePool

        scheduler = planner(self._runner, PagePool(self._runner.info.total_pages))
        for key, prompt in enumerate(prompts):
            scheduler.admit(asked(key, tuple(prompt), tokens))
        count = 0
        while (plan := scheduler.plan(0.0)) is not None:
            events = scheduler.commit(plan, self._runner.run(plan), 0.0)
            count += sum(len(event.token_ids) for event in events)
        assert count == tokens * len(prompts)


class PlainWhippet(Whippet):
    """Runs without speculation, which no peer has on by itself."""

    drafts = False


class Transformers:
    """Runs `generate` of a batch; all prompts have one length. On a CPU with the type and the threads that are
    fastest."""

    def __init__(self, model: str, streams: int, tokens: int) -> None:
        import torch

        package: Any = importlib.import_module("transformers")
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model: Any = None
        if self._device == "cuda":
            self._model = package.AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval().to("cuda")
            return
        best, cores = (float("inf"), 1), torch.get_num_threads()
        for dtype in (torch.float32, torch.bfloat16):
            loaded = package.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
            before: Any = self._model
            self._model = loaded
            took = min((self._timed(threads), threads) for threads in sorted({1, cores}))
            if took < best:
                best = took
            else:
                self._model = before
        torch.set_num_threads(best[1])

    def _timed(self, threads: int) -> float:
        import torch

        torch.set_num_threads(threads)
        self.generate([[5] * 8], 2)
        began = time.monotonic()
        self.generate([[5] * 8], 6)
        return time.monotonic() - began

    def generate(self, prompts: Prompts, tokens: int) -> None:
        import torch

        ids = torch.tensor([list(one) for one in prompts], device=self._device)
        with torch.inference_mode():
            made = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=0,
            )
        assert made.shape[1] == ids.shape[1] + tokens


class Vllm:
    def __init__(self, model: str, streams: int, tokens: int) -> None:
        package: Any = importlib.import_module("vllm")
        self._sampling: Any = package.SamplingParams
        self._llm: Any = package.LLM(
            model,
            max_num_seqs=streams,
            max_model_len=tokens + 64,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            gpu_memory_utilization=0.4,  # others are loaded beside it
        )

    def generate(self, prompts: Prompts, tokens: int) -> None:
        sampling = self._sampling(
            temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": list(one)} for one in prompts]
        made = self._llm.generate(asked, sampling, use_tqdm=False)
        assert all(len(one.outputs[0].token_ids) == tokens for one in made)


class Sglang:
    def __init__(self, model: str, streams: int, tokens: int) -> None:
        package: Any = importlib.import_module("sglang")
        self._engine: Any = package.Engine(
            model_path=model,
            skip_tokenizer_init=True,
            disable_radix_cache=True,
            max_running_requests=streams,
            mem_fraction_static=0.4,
        )

    def generate(self, prompts: Prompts, tokens: int) -> None:
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        self._engine.generate(input_ids=[list(one) for one in prompts], sampling_params=sampling)


class NanoVllm:
    """Uses the only API. It has no greedy choice: a temperature near zero takes the likeliest token."""

    def __init__(self, model: str, streams: int, tokens: int) -> None:
        package: Any = importlib.import_module("nanovllm")
        self._sampling: Any = package.SamplingParams
        self._llm: Any = package.LLM(model, enforce_eager=False, max_model_len=tokens + 64, max_num_seqs=streams)

    def generate(self, prompts: Prompts, tokens: int) -> None:
        sampling = self._sampling(temperature=1e-5, max_tokens=tokens, ignore_eos=True)
        self._llm.generate([list(one) for one in prompts], sampling, use_tqdm=False)


class LlamaServer:
    """Runs `llama-server` on loopback, a slot a stream."""

    def __init__(self, model: str, streams: int, tokens: int) -> None:
        self._url = f"http://127.0.0.1:{free_port()}"
        context = str(streams * (tokens + 64))
        words = ["llama-server", "-m", model, "--host", "127.0.0.1", "--port", self._url.rpartition(":")[2]]
        words += ["-np", str(streams), "-c", context, "-t", str(len(os.sched_getaffinity(0))), "-ngl", "99"]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + _START
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("llama-server did not start")
            time.sleep(0.2)
        self._pool = ThreadPoolExecutor(streams)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=2) as page:
                return bool(page.status == 200)
        except OSError:
            return False

    def generate(self, prompts: Prompts, tokens: int) -> None:
        list(self._pool.map(lambda one: self._ask(one, tokens), prompts))

    def _ask(self, prompt: Sequence[int], tokens: int) -> None:
        asked = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0.0, "ignore_eos": True}
        data = json.dumps({**asked, "cache_prompt": False}).encode()
        request = urllib.request.Request(f"{self._url}/completion", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_START) as page:
            assert json.loads(page.read())["tokens_predicted"] == tokens


class LlamaBinding:
    """Uses the Python binding, which has one stream: several run one after the other."""

    def __init__(self, model: str, streams: int, tokens: int) -> None:
        package: Any = importlib.import_module("llama_cpp")
        threads = len(os.sched_getaffinity(0))
        self._llama: Any = package.Llama(model, n_ctx=tokens + 64, n_threads=threads, n_gpu_layers=-1, verbose=False)

    def generate(self, prompts: Prompts, tokens: int) -> None:
        for prompt in prompts:
            self._llama.reset()
            self._llama.eval(list(prompt))
            for made in range(tokens):
                token = self._llama.sample(temp=0.0)
                if made + 1 < tokens:
                    self._llama.eval([token])


def _llama(model: str, streams: int, tokens: int) -> Peer:
    return (LlamaServer if shutil.which("llama-server") else LlamaBinding)(model, streams, tokens)


KINDS: Mapping[str, PeerKind] = {
    one.name: one
    for one in (
        PeerKind("whippet", "engine", "", Whippet),
        PeerKind("whippet-without-drafts", "engine", "", PlainWhippet),
        PeerKind("transformers", "transformers", "pip install transformers", Transformers),
        PeerKind("vllm", "vllm", "pip install vllm, in an environment with the torch that it names", Vllm),
        PeerKind("sglang", "sglang", "pip install 'sglang[all]'", Sglang),
        PeerKind("nano-vllm", "nanovllm", "pip install git+https://github.com/GeeeekExplorer/nano-vllm", NanoVllm),
        PeerKind(
            "llama.cpp",
            "llama_cpp",
            "put llama-server into the path, or pip install llama-cpp-python",
            _llama,
            gguf=True,
        ),
    )
}


class PeerProcess:
    def __init__(self, kind: PeerKind, model: str, streams: int, tokens: int, vocabulary: int) -> None:
        words = [sys.executable, "-m", "bench.peers", "worker", kind.name, model]
        words += [str(number) for number in (streams, tokens, vocabulary)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def take(self) -> float:
        """Returns the seconds that it reports. Raises RuntimeError."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("bench: "):
                return float(line.removeprefix("bench: "))
        raise RuntimeError("it ended")

    def seconds(self, streams: int, prompt: int, tokens: int, number: int) -> float:
        """Returns the seconds of `streams` answers at once. Raises RuntimeError."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([streams, prompt, tokens, number]) + "\n")
        self._process.stdin.flush()
        return self.take()

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def prompts(streams: int, length: int, number: int, vocabulary: int) -> list[list[int]]:
    """Returns the same prompts for every peer. Never one of the first three ids, which models give a meaning."""
    room = vocabulary - 3
    return [
        [3 + (number * 7919 + row * 104_729 + place * place * 31 + place) % room for place in range(length)]
        for row in range(streams)
    ]


def worker(name: str, model: str, *numbers: str) -> None:
    """Loads a peer, then answers each line with its seconds."""
    streams, tokens, vocabulary = map(int, numbers)
    began = time.monotonic()
    peer = KINDS[name].open(model, streams, tokens)
    peer.generate(prompts(1, 8, 0, vocabulary), 2)
    print(f"bench: {time.monotonic() - began}", flush=True)
    for line in sys.stdin:
        count, length, wanted, number = json.loads(line)
        asked = prompts(count, length, number, vocabulary)
        began = time.monotonic()
        peer.generate(asked, wanted)
        print(f"bench: {time.monotonic() - began}", flush=True)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="whippet bench peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(DEMO) if DEMO.exists() else None, help="a folder or a GGUF file")
    parser.add_argument("--gguf", help="the same model for llama.cpp")
    parser.add_argument("--peers", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], help="at once")
    parser.add_argument("--prompt", type=int, default=32, help="tokens in")
    parser.add_argument("--tokens", type=int, default=48, help="tokens out")
    parser.add_argument("--vocabulary", type=int, default=4096, help="ids of prompts are below it")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(argv)
    if given.model is None:
        parser.error("name a model: --model FOLDER, or a GGUF file")
    if given.gguf is None and Path(given.model).is_file():
        given.gguf = given.model
    return given


def command(argv: Sequence[str] | None = None) -> Result:
    given = arguments(argv)
    absent: dict[str, str] = {}
    rates: dict[str, list[float]] = {}
    firsts: dict[str, list[float]] = {}
    with ExitStack() as stack:
        running = _started(given, stack, absent)
        for number in range(given.rounds + 1):  # the first is for warming up
            for name, process in list(running.items()):
                for streams in given.streams:
                    try:
                        one = process.seconds(streams, given.prompt, 1, number)
                        whole = process.seconds(streams, given.prompt, given.tokens, number)
                    except (RuntimeError, OSError) as error:
                        absent[name] = f"failed while it ran: {error}"
                        del running[name]
                        break
                    if number:
                        key = f"{name}, {streams} streams"
                        rates.setdefault(key, []).append(streams * (given.tokens - 1) / max(whole - one, 1e-9))
                        firsts.setdefault(key, []).append(1e3 * one)
            print(f"round {number} of {given.rounds}", flush=True)
    rows = _rows(rates, firsts)
    for row in rows:
        print(
            f"{row['peer']:28} {row['tokens_per_second']:10.1f} tokens/s  first token {row['first_ms']:9.1f} ms"
            f"  whippet is {row['whippet_times']} times as fast"
        )
    for name, why in absent.items():
        print(f"{name:28} missing: {why}")
    versions = {name: KINDS[name].version() for name in given.peers if name not in absent}
    figures = {"rows": rows, "missing": absent, "versions": versions}
    samples = {name: Samples("tokens/s", tuple(values)) for name, values in rates.items()}
    samples |= {f"{name}, first token": Samples("ms", tuple(values)) for name, values in firsts.items()}
    return Result("peers", {**vars(given), "model": Path(given.model).name}, figures, samples)


def _started(given: argparse.Namespace, stack: ExitStack, absent: dict[str, str]) -> dict[str, PeerProcess]:
    running: dict[str, PeerProcess] = {}
    for name in given.peers:
        kind = KINDS[name]
        if why := kind.missing(given.model, given.gguf):
            absent[name] = why
            continue
        model = given.gguf if kind.gguf else given.model
        process = PeerProcess(kind, model, max(given.streams), given.prompt + given.tokens, given.vocabulary)
        stack.callback(process.close)
        try:
            print(f"{name}: loaded in {process.take():.1f} s", flush=True)
        except RuntimeError:
            absent[name] = "installed, but it does not load this model here; its reason stands above"
            continue
        running[name] = process
    return running


def _rows(rates: Mapping[str, Sequence[float]], firsts: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    rows = []
    for name, values in rates.items():
        ours = rates.get(f"whippet, {name.partition(', ')[2]}", ())
        pairs = zip(ours, values, strict=False)
        times = round(statistics.median(a / b for a, b in pairs), 2) if ours else None
        rate, first = round(statistics.median(values), 1), round(statistics.median(firsts[name]), 2)
        rows.append({"peer": name, "tokens_per_second": rate, "first_ms": first, "whippet_times": times})
    return rows


if __name__ == "__main__":
    worker(*sys.argv[2:])
