"""How long a start takes, with an empty cache of kernels and with a full one, and what it consists of.

    python -m bench.start --model bench/models/qwen3-0.6b --load-format dummy --max-context 1024

`engine` is a process that does what the engine process does at its start: seconds from its start to the end of each
phase. `server` is a whole server, from its start to its readiness. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.own_server import server, with_tokenizer

_STARTED = "BENCH_STARTED"  # environment variable: when the process was started


def engine(flags: Sequence[str], cache: Path) -> dict[str, Any]:
    """Of one process of its own."""
    environment = {**os.environ, _STARTED: repr(time.time()), "WHIPPET_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "bench.start", "--inside", *flags]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "compiled": len(list((cache / "kernels").glob("*.cubin")))}


def inside(flags: argparse.Namespace) -> dict[str, Any]:
    """Phases and when they ended, in seconds."""
    began = float(os.environ[_STARTED])
    ends: dict[str, float] = {"interpreter": time.time() - began}
    import torch

    ends["torch"] = time.time() - began
    from engine.settings import EngineSettings
    from engine.worker.build import make_runner, prepare

    ends["imports"] = time.time() - began
    names = {"kernels": "kernels", "graphs": "decode graphs", "prefill": "prefill graphs", "batches": "batch graphs"}

    def progress(phase: str, done: int, total: int) -> None:
        ends[names.get(phase, phase)] = time.time() - began

    settings = EngineSettings(
        model=str(flags.model),
        device=flags.device,
        load_format=flags.load_format,
        max_sequences=flags.max_sequences,
        max_context=flags.max_context,
        kv_bytes=flags.kv_bytes,
    )
    prepared = prepare(settings, progress)
    if prepared.parts.model.placement.device.type == "cuda":
        torch.cuda.synchronize()
    ends["load"] = time.time() - began
    runner = make_runner(settings, prepared, progress)
    ends["ready"] = time.time() - began
    return {"ends": {name: round(at, 2) for name, at in ends.items()}, "decoder": runner.info.decoder}


def main() -> int:
    """Empty and full, engine and server."""
    flags = _parser().parse_args()
    if flags.inside:
        print(json.dumps(inside(flags)))
        sys.stdout.flush()
        os._exit(0)  # what is measured is the start
    given = [f"--model={flags.model}", f"--device={flags.device}", f"--load-format={flags.load_format}"]
    for name in ("max_sequences", "max_context", "kv_bytes"):
        if getattr(flags, name) is not None:
            given.append(f"--{name.replace('_', '-')}={getattr(flags, name)}")
    found: dict[str, Any] = {"model": flags.model.name, "cores": len(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("empty", "full"):
            found[f"engine {kind}"] = told = engine(given, Path(folder) / "engine")
            print(f"engine {kind}: {told['compiled']} kernels, {told['ends']}", flush=True)
        if not flags.engine_only:
            served = with_tokenizer(flags.model, Path(folder) / "model")
            asked = [f"--cache-dir={folder}/server", *given, f"--model={served}"]
            for kind in ("empty", "full"):
                with server(asked) as one:
                    found[f"server {kind}"] = round(one.seconds, 2)
                print(f"server {kind}: ready after {found[f'server {kind}']} s", flush=True)
    print(json.dumps(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.start", allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--max-sequences", type=int)
    parser.add_argument("--max-context", type=int)
    parser.add_argument("--kv-bytes", type=int)
    parser.add_argument("--engine-only", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
