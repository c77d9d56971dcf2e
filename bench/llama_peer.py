"""Runs llama.cpp for `bench.cpu_peers`, in an interpreter that has llama-cpp-python: a JSON line for each request on
stdin.

    {"model": FILE, "streams": 8, "prompt": 32, "tokens": 64, "threads": 2}  →  {"tokens_per_second": …, "ttft_ms": …}

Also makes a GGUF file of another type of another: {"from": FILE, "to": FILE, "type": "Q8_0"}.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp as llama  # type: ignore[import-not-found, unused-ignore]

TYPES = {"BF16": llama.LLAMA_FTYPE_MOSTLY_BF16, "Q8_0": llama.LLAMA_FTYPE_MOSTLY_Q8_0}
_models: dict[str, Any] = {}
_quiet = llama.llama_log_callback(lambda level, text, data: None)


def model_of(file: str) -> Any:
    """Loads a file once."""
    if file not in _models:
        how = llama.llama_model_default_params()
        how.use_extra_bufts = False  # products by AMX crash where a virtual machine only claims to have it
        _models[file] = llama.llama_model_load_from_file(file.encode(), how)
    return _models[file]


def requantize(source: str, target: str, kind: str) -> None:
    how = llama.llama_model_quantize_default_params()
    how.ftype, how.allow_requantize, how.nthread = TYPES[kind], True, 2
    if llama.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(how)):
        raise RuntimeError(f"{target}: could not be written")


def fill(batch: Any, places: list[tuple[int, int, int, bool]]) -> None:
    batch.n_tokens = len(places)
    for at, (token, position, stream, wanted) in enumerate(places):
        batch.token[at], batch.pos[at] = token, position
        batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, stream, wanted


def measure(model: str, streams: int, prompt: int, tokens: int, threads: int) -> dict[str, float]:
    """Decodes greedily; a rate is of the step that a quarter of the steps are faster than, as in `bench.cpu_peers`."""
    how = llama.llama_context_default_params()
    how.n_ctx, how.n_batch, how.n_seq_max = streams * (prompt + tokens + 16), 512, streams
    how.n_threads = how.n_threads_batch = threads
    context = llama.llama_init_from_model(model_of(model), how)
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model_of(model)))
    chooser = llama.llama_sampler_init_greedy()
    batch = llama.llama_batch_init(512, 0, streams)
    last, first = [], 0.0
    for stream in range(streams):
        began = time.perf_counter()
        ids = [(stream * 977 + 31 * at * at + 7) % (vocabulary - 100) for at in range(prompt)]
        fill(batch, [(one, at, stream, at == prompt - 1) for at, one in enumerate(ids)])
        llama.llama_decode(context, batch)
        last.append(llama.llama_sampler_sample(chooser, context, prompt - 1))
        first = first or time.perf_counter() - began
    steps = []
    for at in range(tokens - 1):
        began = time.perf_counter()
        fill(batch, [(one, prompt + at, stream, True) for stream, one in enumerate(last)])
        llama.llama_decode(context, batch)
        last = [llama.llama_sampler_sample(chooser, context, stream) for stream in range(streams)]
        steps.append(time.perf_counter() - began)
    llama.llama_batch_free(batch)
    llama.llama_sampler_free(chooser)
    llama.llama_free(context)
    return {"tokens_per_second": streams / sorted(steps)[len(steps) // 4], "ttft_ms": first * 1e3}


def main() -> None:
    llama.llama_log_set(_quiet, ctypes.c_void_p(0))
    llama.llama_backend_init()
    for line in sys.stdin:
        asked = json.loads(line)
        if "from" in asked:
            requantize(asked["from"], asked["to"], asked["type"])
            print(json.dumps({}), flush=True)
        else:
            print(json.dumps(measure(**asked)), flush=True)


if __name__ == "__main__":
    main()
