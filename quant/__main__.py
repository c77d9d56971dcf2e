"""`whippet quantize MODEL OUT`, `whippet evaluate MODEL [--against BASE]` and `whippet convert MODEL OUT`.

torch is imported once there is work for it: help and wrong usage do not wait for it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from quant.checkpoint.errors import CheckpointError
from quant.checkpoint.named import FOLDER, misnamed
from quant.claim import claimed
from quant.errors import CannotQuantize
from quant.progress import Progress, progress_display

USAGE = 2  # exit codes
STOPPED = 130
_QUANTIZE = (
    "Writes a 4-bit or 8-bit folder of a model in 16 or 32 bits, a layer at a time, and judges it. The same command "
    "goes on with a run that was stopped."
)
_EVALUATE = (
    "Perplexity of a model on a text. With a base: how far the model is from it, and whether it meets the bar that "
    "quantized models are held to."
)
_CONVERT = (
    "Writes a folder with safetensors: of a GGUF file, in 16 bits; or of a folder with pickled weights "
    "(pytorch_model.bin, .pth, .pt, .ckpt), which are never unpickled, so that no code in them runs. The folder "
    "appears whole or not at all."
)
_MAKER_CODES = "Exit code: 0 made; 1 impossible, one line has the reason; 2 wrong usage; 130 ctrl-C."
_QUANTIZER_CODES = (
    "Exit code: 0 made, and all bars are met; 1 impossible, or made and a bar is missed; 2 wrong usage; 130 ctrl-C."
)
_EVALUATE_CODES = "Exit code: 0 judged; 1 impossible, or a bar was missed; 2 wrong usage; 130 ctrl-C."
_ON_STOP = {"quantize": "; the same command goes on from here"}


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
    for model in (given.model, getattr(given, "against", None)):
        if model is not None and (refused := misnamed(model)):
            sys.stderr.write(f"{refused}\n")
            return USAGE
    progress = progress_display()
    try:
        with _interruptible(), claimed(given.out) if "out" in given else nullcontext():
            _check(given)
            text, misses = _COMMANDS[given.command](given, progress)
    except (CheckpointError, CannotQuantize) as error:
        progress.close()
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        progress.close()
        sys.stderr.write(f"stopped{_ON_STOP.get(given.command, '')}\n")
        return STOPPED
    progress.close()
    sys.stdout.write(text)
    if misses:
        judged = given.out if "out" in given else given.model
        sys.stderr.write(f"{judged} misses the bar: {'; '.join(misses)}\n")
        return 1
    return 0


def _check(given: argparse.Namespace) -> None:
    """Faults of the arguments that later steps would report less clearly; then torch's threads are set."""
    for model in (given.model, getattr(given, "against", None)):
        if model is not None and not model.is_dir() and not model.is_file():
            raise CannotQuantize(f"{model} is not there: give {FOLDER}")
    if given.command == "quantize" and given.model.is_file():
        raise CannotQuantize(f"{given.model} holds few bits already: `whippet convert` makes a folder of plain numbers")
    if "device" not in given:
        return
    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        raise CannotQuantize("this torch sees no CUDA device: leave --device out")
    if given.threads is not None:
        torch.set_num_threads(given.threads)


def _quantize(given: argparse.Namespace, progress: Progress) -> tuple[str, tuple[str, ...]]:
    from quant.quantizer import QuantizeOptions, quantize

    options = QuantizeOptions(
        format=given.format,
        engine=given.engine,
        group=given.group,
        budget=given.budget,
        text=given.text,
        own_text=given.own_text,
        samples=given.samples,
        held_out=given.held_out,
        length=given.length,
        seed=given.seed,
        device=given.device,
    )
    report = quantize(given.model, given.out, options, progress)
    return report.markdown(), report.misses()


def _evaluate(given: argparse.Namespace, progress: Progress) -> tuple[str, tuple[str, ...]]:
    import torch

    from quant.calibration import text_windows
    from quant.evaluate import evaluate
    from quant.report import evaluation_lines

    windows = text_windows(given.model, given.text, given.length, given.windows)
    found = evaluate(given.model, windows, given.against, progress, torch.device(given.device))
    misses = found.comparison.misses() if found.comparison else ()
    text = json.dumps(asdict(found)) if given.json else "\n".join(evaluation_lines(found))
    return f"{text}\n", misses


def _convert(given: argparse.Namespace, progress: Progress) -> tuple[str, tuple[str, ...]]:
    from quant.convert import convert

    return convert(given.model, given.out, progress), ()


_COMMANDS = {"quantize": _quantize, "evaluate": _evaluate, "convert": _convert}


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="whippet", description="Quantize a model folder, judge or convert one.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_quantize(commands.add_parser("quantize", description=_QUANTIZE, epilog=_QUANTIZER_CODES, allow_abbrev=False))
    _add_evaluate(commands.add_parser("evaluate", description=_EVALUATE, epilog=_EVALUATE_CODES, allow_abbrev=False))
    change = commands.add_parser("convert", description=_CONVERT, epilog=_MAKER_CODES, allow_abbrev=False)
    change.add_argument(
        "model", type=Path, metavar="MODEL", help="GGUF file, or folder with config.json and pickled weights"
    )
    change.add_argument("out", type=Path, metavar="OUT", help="new folder")
    return parser


def _add_quantize(make: argparse.ArgumentParser) -> None:
    make.add_argument("model", type=Path, metavar="MODEL", help=FOLDER)
    make.add_argument("out", type=Path, metavar="OUT", help="new folder, or that of a run that was stopped")
    make.add_argument(
        "--format", choices=("awq", "int8"), default="awq", help="4 bits (awq) or 8; default: %(default)s"
    )
    engines = "who does it; autoawq and bitsandbytes are packages to install; default: %(default)s"
    make.add_argument("--engine", choices=("own", "autoawq", "bitsandbytes"), default="own", help=engines)
    groups = "inputs that share a scale: 32, 64 or 128; default: the smallest that fits a budget"
    make.add_argument("--group", type=int, metavar="N", help=groups)
    budget = (
        "bits a weight: within it the linears that lose most stay in 8 bits; default: 4.75, or with --group none does"
    )
    make.add_argument("--budget", type=float, metavar="BITS", help=budget)
    make.add_argument("--text", type=Path, metavar="FILE", help="calibration text; default: English text that ships")
    make.add_argument("--own-text", action="store_true", help="have the model write the calibration text, slowly")
    make.add_argument("--samples", type=int, default=32, metavar="N", help="calibration windows; default: %(default)s")
    make.add_argument(
        "--held-out", type=int, default=8, metavar="N", help="windows that only judge the result; default: %(default)s"
    )
    make.add_argument("--length", type=int, default=512, metavar="N", help="tokens in a window; default: %(default)s")
    make.add_argument("--seed", type=int, default=0, metavar="N", help="of the model's own text; default: %(default)s")
    _add_machine(make)


def _add_evaluate(evaluate: argparse.ArgumentParser) -> None:
    evaluate.add_argument("model", type=Path, metavar="MODEL", help=FOLDER)
    evaluate.add_argument("--against", type=Path, metavar="BASE", help="compare with this one, of the same tokenizer")
    evaluate.add_argument("--text", type=Path, required=True, metavar="FILE", help="what both models read, in UTF-8")
    evaluate.add_argument("--windows", type=int, metavar="N", help="how many, spread over the text; default: all")
    evaluate.add_argument(
        "--length", type=int, default=512, metavar="N", help="tokens in a window; default: %(default)s"
    )
    evaluate.add_argument("--json", action="store_true", help="print one JSON object")
    _add_machine(evaluate)


def _add_machine(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    command.add_argument("--threads", type=_count, metavar="N", help="of torch; default: all cores")


if __name__ == "__main__":
    sys.exit(main())
