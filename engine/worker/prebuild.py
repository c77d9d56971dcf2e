"""Compiles ahead what servers would compile at their first start: `python -m engine.worker.prebuild --into FOLDER`.
Products in C for every level of CPU; with a model, its kernels for GPUs that need not be here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from engine.errors import EngineError
from engine.kernels.gpu import SERVERS, gpus_of
from engine.linear.products import NoProducts, build_ahead
from engine.settings import EngineSettings, Quantization


def main(argv: Sequence[str] | None = None) -> int:
    flags = _parser().parse_args(argv)
    folder: Path = flags.into
    folder.mkdir(parents=True, exist_ok=True)
    try:
        made = build_ahead(folder)
        sys.stdout.write("".join(f"{path}\n" for path in made))
        for model in flags.model:
            for arch in flags.arch.split(","):
                _kernels(folder, EngineSettings(model=str(model), quantization=flags.quantization), arch, flags)
    except (NoProducts, EngineError, _NoKernels, ValueError) as failure:
        sys.stderr.write(f"whippet: {failure}\n")
        return 1
    return 0


class _NoKernels(Exception):
    pass


def _kernels(folder: Path, settings: EngineSettings, arch: str, flags: argparse.Namespace) -> None:
    from engine.kernels.build import BuildError, KernelLibrary, architecture, kept_in  # torch, which takes seconds
    from engine.loading.formats import read_folder
    from engine.worker.required_kernels import KernelQuery, required_kernels_any_context

    config, form = read_folder(Path(settings.model), settings.quantization)
    form = form.on("cuda")
    for capability, gpu in gpus_of(arch):
        if flags.multiprocessors is not None:
            gpu = replace(gpu, multiprocessors=flags.multiprocessors)
        sources = required_kernels_any_context(settings, KernelQuery(config, form, gpu))
        try:
            library = KernelLibrary(architecture(capability), kept_in(folder), gpu)
            library.compile_ahead(sources)
            size = sum(len(library.code(source)) for source in sources)
        except BuildError as failure:
            raise _NoKernels(" ".join(str(failure).split())[:2000]) from failure
        sys.stdout.write(
            f"{folder}: {len(sources)} kernels of {settings.model} for {arch} with {gpu.multiprocessors} "
            f"multiprocessors, {size >> 10} KiB\n"
        )
        if flags.multiprocessors is not None:
            break


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.worker.prebuild", allow_abbrev=False)
    parser.add_argument("--into", type=Path, metavar="FOLDER", required=True)
    parser.add_argument("--model", type=Path, action="append", default=[])
    parser.add_argument("--arch", default=",".join(f"sm_{major}{minor}" for major, minor in SERVERS))
    parser.add_argument("--multiprocessors", type=int)
    parser.add_argument("--quantization", default="auto", choices=get_args(Quantization))
    return parser


if __name__ == "__main__":
    sys.exit(main())
