"""How long a start takes, with an empty cache of kernels, with kernels compiled ahead, and with a full cache, and what
it consists of.

    python -m bench.start --model bench/models/qwen3-0.6b --load-format dummy --max-context 1024

`engine` is the engine process: seconds from its start to the end of each phase that it reports. `server` is a whole
server, from its start to its readiness, and what the first requests then wait for their first tokens. Ends in one JSON
line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc

from bench.own_server import server, with_tokenizer
from engine.ipc.frames import Progress, Ready, report_reader
from engine.launch import Begun
from engine.settings import EngineSettings
from service.pb.whippet.v1 import generation_pb2 as pb
from service.pb.whippet.v1.generation_pb2_grpc import GenerationServiceStub

_REQUESTS = 20  # the first
_UNCACHED = (
    "--optimizations.response-cache=false",
    "--cache.semantic.mode=off",
)  # the embedder would be exported meanwhile
_LONGEST = 300.0  # seconds of a start


def engine(settings: EngineSettings, cache: Path) -> dict[str, Any]:
    """Of one process of its own."""
    with _environment(WHIPPET_CACHE_DIR=str(cache)):
        began = time.monotonic()
        begun = Begun(settings.kind)
        begun.tell(settings)
    ours, process, _ = begun.take()
    ends: dict[str, float] = {}
    decoder, reader = None, report_reader()
    with ours:
        while decoder is None and select.select([ours], [], [], _LONGEST)[0]:
            for report in reader.feed(data) if (data := ours.recv(1 << 16)) else _gone():
                if isinstance(report, Progress):
                    ends[report.stage] = round(time.monotonic() - began, 2)
                elif isinstance(report, Ready):
                    ends["ready"] = round(time.monotonic() - began, 2)
                    decoder = report.info.decoder
    process.kill()
    process.wait()
    return {"ends": ends, "decoder": decoder, "compiled": len(list((cache / "kernels").glob("*.cubin")))}


def _gone() -> Iterator[Any]:
    raise RuntimeError("the engine process did not start")


def first_tokens(address: str) -> dict[str, float]:
    """Milliseconds until the first token of each of the first requests, one after the other."""
    found = []
    with grpc.insecure_channel(address) as channel:
        stub = GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        for number in range(_REQUESTS):
            request = pb.GenerateStreamRequest(text=f"{number}: def read_json(path):")
            request.stopping.max_tokens = 8
            begun = time.monotonic()
            stream = iter(stub.GenerateStream(request, timeout=120))
            next(stream)
            found.append(1e3 * (time.monotonic() - begun))
            for _ in stream:
                pass
    return {"first": round(found[0], 1), "median": round(statistics.median(found), 1), "worst": round(max(found), 1)}


def main() -> int:
    """Empty, ahead where there is such a folder, and full; engine and server."""
    flags = _parser().parse_args()
    given = {name: value for name in _GIVEN if (value := getattr(flags, name)) is not None}
    settings = EngineSettings(model=str(flags.model), **given)
    asked = [*_UNCACHED]
    asked += [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    ahead = {} if flags.ahead is None else {"ahead": {"WHIPPET_PREBUILT_DIR": str(flags.ahead.resolve())}}
    kinds: Mapping[str, Mapping[str, str]] = {"empty": {}, "full": {}, **ahead}
    found: dict[str, Any] = {"model": flags.model.name, "cores": len(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory() as folder:
        served = with_tokenizer(flags.model, Path(folder) / "model")
        for kind, environment in kinds.items():
            caches = Path(folder) / ("ahead" if kind == "ahead" else "kept")  # which the first start fills
            with _environment(**environment):
                if flags.part != "server":
                    found[f"engine {kind}"] = told = engine(settings, caches / "engine")
                    print(f"engine {kind}: {told['compiled']} kernels, {told['ends']}", flush=True)
                if flags.part != "engine":
                    with server([f"--cache-dir={caches}/server", f"--model={served}", *asked]) as one:
                        found[f"server {kind}"] = {"ready": round(one.seconds, 2), "ttft_ms": first_tokens(one.address)}
                    print(f"server {kind}: {found[f'server {kind}']}", flush=True)
    print(json.dumps(found))
    return 0


_GIVEN = ("device", "load_format", "max_sequences", "max_context", "kv_bytes")


@contextlib.contextmanager
def _environment(**changes: str) -> Iterator[None]:
    """Of processes that are started meanwhile."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.start", allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--max-sequences", type=int)
    parser.add_argument("--max-context", type=int)
    parser.add_argument("--kv-bytes", type=int)
    parser.add_argument("--ahead", type=Path, metavar="FOLDER", help="what `whippet prebuild` made; a third case")
    parser.add_argument("--part", choices=("engine", "server"), help="both unless said")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
