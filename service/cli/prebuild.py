"""Makes ahead what servers compile or export at their first start: `whippet prebuild`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from service.cli.interpreter import run_module


def run(argv: Sequence[str]) -> int:
    flags = _parser().parse_args(argv)
    into: Path = flags.into.resolve()
    into.mkdir(mode=0o755, parents=True, exist_ok=True)
    code = run_module("engine.worker.prebuild", ["--into", str(into / "kernels"), *_kernels(flags)])
    if code == 0 and flags.embedder:
        code = run_module("cache.semantic.export", ["--into", str(into / "embedders")])
    _for_everybody(into)
    return code


def _kernels(flags: argparse.Namespace) -> list[str]:
    given = [f"--model={model.resolve()}" for model in flags.model]
    for name in ("arch", "multiprocessors", "quantization"):
        if getattr(flags, name) is not None:
            given.append(f"--{name}={getattr(flags, name)}")
    return given


def _for_everybody(folder: Path) -> None:
    """Servers run as other users: readable by all, and written by its owner alone."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="whippet prebuild",
        description="Compiles what servers would compile at their first start, into a folder that `--prebuilt-dir` or "
        "WHIPPET_PREBUILT_DIR names: products in C for every level of CPU and, if asked for, the embedder, and the "
        "kernels of models for GPUs, which need not be here. Needs a C compiler, and for kernels the extra `cuda`.",
        allow_abbrev=False,
    )
    parser.add_argument("--into", type=Path, metavar="FOLDER", required=True, help="made where it is not there")
    parser.add_argument("--embedder", action="store_true", help="export the semantic cache's embedder (extra `embed`)")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        action="append",
        default=[],
        help="compile the kernels of this model, whose config.json suffices; may be given several times",
    )
    parser.add_argument(
        "--arch",
        metavar="SM",
        help="for GPUs of these architectures: all of sm_80,sm_86,sm_89,sm_90,sm_100,sm_120 by default",
    )
    parser.add_argument(
        "--multiprocessors",
        type=int,
        metavar="N",
        help="of the GPU, where it is none of those that servers of its architecture have, such as a part of one (MIG)",
    )
    parser.add_argument("--quantization", metavar="HOW", help="as servers are given it")
    return parser
