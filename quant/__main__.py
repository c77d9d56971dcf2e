"""`whippet quantize MODEL OUT` and `whippet evaluate MODEL [--against BASE]`, with a progress bar.

torch is imported once there is work for it: help and wrong usage do not wait for it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Never

from tqdm import tqdm

from quant.checkpoint.errors import CheckpointError
from quant.errors import CannotQuantize

STOPPED = 130  # exit status of a command that was interrupted


class Bars:
    """One bar a stage, with the time left. Resumed layers count as done, not as fast."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: tqdm[Never] = tqdm(disable=True)

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._stage != stage:
            self._bar.close()
            self._stage = stage
            self._bar = tqdm(total=total, desc=stage, initial=done, file=sys.stderr)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Every failure after ctrl-C is a KeyboardInterrupt: native code on the stack turns the first one into errors of
    its own, such as a ValueError."""
    came = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # otherwise a shell that put us into the background has it ignored
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as error:
        if came:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    bars = Bars()
    try:
        with _interruptible():
            _check(given)
            text, misses = _quantize(given, bars) if given.command == "quantize" else _evaluate(given, bars)
    except (CheckpointError, CannotQuantize) as error:
        bars.close()
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        bars.close()
        sys.stderr.write(
            "stopped" + ("; the same command goes on from here\n" if given.command == "quantize" else "\n")
        )
        return STOPPED
    bars.close()
    sys.stdout.write(text)
    if misses:
        sys.stderr.write(f"{given.model} misses the bar: {'; '.join(misses)}\n")
        return 1
    return 0


def _check(given: argparse.Namespace) -> None:
    """Faults of the arguments that later steps would report less clearly; then torch's threads are set."""
    for folder in (given.model, getattr(given, "against", None)):
        if folder is not None and not folder.is_dir():
            raise CannotQuantize(f"{folder} is no folder: give one with config.json, *.safetensors and tokenizer.json")
    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        raise CannotQuantize("this torch sees no CUDA device: leave --device out")
    if given.threads is not None:
        torch.set_num_threads(given.threads)


def _quantize(given: argparse.Namespace, bars: Bars) -> tuple[str, tuple[str, ...]]:
    """What to print, and the bars that were missed, which only an evaluation says."""
    from quant.quantizer import QuantizeOptions, quantize

    options = QuantizeOptions(
        format=given.format,
        engine=given.engine,
        group=given.group,
        text=given.text,
        samples=given.samples,
        held_out=given.held_out,
        length=given.length,
        seed=given.seed,
        device=given.device,
    )
    return quantize(given.model, given.out, options, bars).markdown(), ()


def _evaluate(given: argparse.Namespace, bars: Bars) -> tuple[str, tuple[str, ...]]:
    import torch

    from quant.calibration import text_windows
    from quant.evaluate import evaluate
    from quant.report import evaluation_lines

    windows = text_windows(given.model, given.text, given.length, given.windows)
    found = evaluate(given.model, windows, given.against, bars, torch.device(given.device))
    misses = found.comparison.misses() if found.comparison else ()
    text = json.dumps(asdict(found)) if given.json else "\n".join(evaluation_lines(found))
    return f"{text}\n", misses


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="whippet", description="Quantize a model folder, or judge one.")
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("quantize", help="write a 4-bit or 8-bit model folder; a stopped run goes on")
    make.add_argument("model", type=Path)
    make.add_argument("out", type=Path)
    make.add_argument("--format", choices=("awq", "int8"), default="awq")
    make.add_argument("--engine", choices=("own", "autoawq", "bitsandbytes"), default="own")
    make.add_argument("--group", type=int, default=128, help="inputs that share a scale: 32, 64 or 128")
    make.add_argument("--text", type=Path, help="calibration text; without it the model writes its own, slowly")
    make.add_argument("--samples", type=int, default=128, help="calibration windows")
    make.add_argument("--held-out", type=int, default=32, help="windows that only judge the result")
    make.add_argument("--length", type=int, default=512, help="tokens in a window")
    make.add_argument("--seed", type=int, default=0, help="of the model's own text")
    judge = commands.add_parser("evaluate", help="perplexity; with a base also KL, agreement and greedy agreement")
    judge.add_argument("model", type=Path)
    judge.add_argument("--against", type=Path, help="the base, as a model folder with the same tokenizer")
    judge.add_argument("--text", type=Path, required=True)
    judge.add_argument("--windows", type=int, help="how many, spread over the text; without it all")
    judge.add_argument("--length", type=int, default=512, help="tokens in a window")
    judge.add_argument("--json", action="store_true", help="one line for machines")
    for command in (make, judge):
        command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
        command.add_argument("--threads", type=_count, help="of torch; without it all cores")
    return parser


if __name__ == "__main__":
    sys.exit(main())
