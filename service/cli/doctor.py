"""Reports what this machine has, and how a model would be served on it: `whippet doctor`.

Exit code 1 where serving is impossible, 2 where the path is no model's folder. A taken port does not fail, since a
running server takes it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from engine.errors import InvalidModel
from engine.settings import Device, Dtype, KvDtype, ModelOptions, Quantization
from quant.checkpoint.named import misnamed
from service.cli import machine as machines
from service.cli.channel import USAGE, complain
from service.cli.doctor_text import render
from service.cli.interpreter import command, environment
from service.core.operations.cache_dir import PREBUILT, UnsafeFolder, look, look_ahead
from service.version import version

_AS_SERVE = "as for `whippet serve`; default: %(default)s"
_PORT = "say whether it is free; default: %(default)s"
ENGINE_TIMEOUT = 120.0  # seconds; a cold disk and a sleeping GPU take their time


def run(argv: Sequence[str]) -> int:
    flags = _parser().parse_args(argv)
    for folder in (flags.model, flags.draft_model):
        if folder is not None and (refused := misnamed(folder)):
            return complain(refused, USAGE)
    if flags.draft_model is not None and flags.model is None:
        return complain("--draft-model guesses for a model: name that by --model", USAGE)
    if flags.gpu is not None and (unfit := _no_plan(flags)):
        return complain(unfit, USAGE)
    report = examine(flags) if flags.gpu is None else plan(flags)
    text = json.dumps(report, indent=2) if flags.json else render(report, flags.all)
    sys.stdout.write(text + "\n")
    return 1 if report["problems"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="whippet doctor",
        description="Reports what this machine has and how a model would be served on it. Loads no weights.",
        epilog="Exit code: 1 where serving is impossible; 2: wrong usage, or no folder of a model.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", help="report how this folder or GGUF file would be served")
    model = ModelOptions()
    parser.add_argument("--device", default=model.device, choices=get_args(Device), help=_AS_SERVE)
    parser.add_argument("--dtype", default=model.dtype, choices=get_args(Dtype), help=_AS_SERVE)
    parser.add_argument("--quantization", default=model.quantization, choices=get_args(Quantization), help=_AS_SERVE)
    parser.add_argument("--kv-dtype", default=model.kv_dtype, choices=get_args(KvDtype), help=_AS_SERVE)
    parser.add_argument("--decoder", default=model.decoder, metavar="NAME", help=_AS_SERVE)
    parser.add_argument("--tensor-parallel", default=model.tensor_parallel, type=_ranks, metavar="N", help=_AS_SERVE)
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="as for `whippet serve`")
    parser.add_argument("--draft-model", metavar="FOLDER", help="report whether it can draft for that of --model")
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="report how a GPU that is not here would serve the model, whose config.json suffices: l4, rtx-4090,"
        " a100-40, h100, sm_86 and others",
    )
    parser.add_argument("--listen", default="127.0.0.1:50051", metavar="HOST:PORT", help=_PORT)
    parser.add_argument("--admin-listen", default="127.0.0.1:50052", metavar="HOST:PORT", help=_PORT)
    parser.add_argument("--health-listen", default="127.0.0.1:50053", metavar="HOST:PORT", help=_PORT)
    parser.add_argument("--metrics-listen", default="127.0.0.1:9090", metavar="HOST:PORT", help=_PORT)
    parser.add_argument("--cache-dir", type=Path, metavar="FOLDER", help="as for `whippet serve`")
    parser.add_argument("--prebuilt-dir", type=Path, metavar="FOLDER", help="as for `whippet serve`")
    parser.add_argument(
        "--digest", action="store_true", help="read all weights and print what --model-digest may demand"
    )
    parser.add_argument("--all", action="store_true", help="report also what is not in use, and more of the machine")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _no_plan(flags: argparse.Namespace) -> str | None:
    """Returns why there is no plan for a GPU that is not here with these flags."""
    if flags.model is None:
        return "--gpu tells how a model would be served: name that by --model"
    others = {
        "--device": flags.device != "auto",
        "--draft-model": flags.draft_model is not None,
        "--tensor-parallel": flags.tensor_parallel not in ("auto", 1),
        "--digest": flags.digest,
        "--chat-template": flags.chat_template is not None,
    }
    given = [name for name, is_given in others.items() if is_given]
    return f"--gpu plans for one GPU and reads the config alone: leave out {', '.join(given)}" if given else None


def _ranks(word: str) -> int | str:
    if word != "auto" and not (word.isdecimal() and 1 <= int(word) <= 64):
        raise argparse.ArgumentTypeError("write auto, or a number from 1 to 64")
    return word if word == "auto" else int(word)


def plan(flags: argparse.Namespace) -> dict[str, Any]:
    """Reports on a GPU that is not here, and nothing on this machine."""
    engine = _engine_report(flags)
    return {
        "whippet": version(),
        "gpu": flags.gpu,
        "engine": engine,
        "model": {"folder": flags.model, "text": None},
        "problems": engine.get("problems", []),
        "warnings": engine.get("warnings", []),
    }


def examine(flags: argparse.Namespace) -> dict[str, Any]:
    machine = machines.look()
    missing = [f"package {name} is not installed" for name, found in machine.packages.items() if found is None]
    engine = _engine_report(flags)
    text, text_problems = _text_report(flags.model, flags.chat_template)
    addresses = (flags.listen, flags.admin_listen, flags.health_listen, flags.metrics_listen)
    kept, unsafe = _kept(flags.cache_dir)
    ahead, unsafe_ahead = _ahead(flags.prebuilt_dir)
    problems = [*missing, *unsafe, *unsafe_ahead, *engine.get("problems", []), *text_problems]
    return {
        "whippet": version(),
        "machine": asdict(machine),
        "kept": kept,
        "prebuilt": ahead,
        "engine": engine,
        "model": None if flags.model is None else {"folder": flags.model, "text": text},
        "ports": [asdict(machines.probe(address)) for address in addresses if address],
        "problems": list(dict.fromkeys(problems)),
        "warnings": engine.get("warnings", []),
    }


def _kept(folder: Path | None) -> tuple[dict[str, str | None], list[str]]:
    try:
        found = look(folder, os.environ)
    except UnsafeFolder as error:
        return {"folder": str(folder), "wrong": "cannot be used"}, [str(error)]
    return {"folder": None if found.path is None else str(found.path), "wrong": found.wrong or None}, []


def _ahead(folder: Path | None) -> tuple[str | None, list[str]]:
    named = os.environ.get(PREBUILT)
    try:
        path = look_ahead(folder or (Path(named) if named else None))
    except UnsafeFolder as error:
        return "cannot be used", [str(error)]
    return None if path is None else str(path), []


def _engine_report(flags: argparse.Namespace) -> dict[str, Any]:
    arguments = ["--device", flags.device, "--dtype", flags.dtype, "--decoder", flags.decoder]
    arguments += ["--quantization", flags.quantization, "--kv-dtype", flags.kv_dtype]
    arguments += ["--tensor-parallel", str(flags.tensor_parallel)]
    if flags.digest:
        arguments.append("--digest")
    if flags.gpu is not None:
        arguments += ["--gpu", flags.gpu]
    if flags.model is not None:
        arguments += ["--model", flags.model]
    if flags.draft_model is not None:
        arguments += ["--draft-model", flags.draft_model]
    try:
        done = subprocess.run(
            command("engine.worker.doctor", arguments),
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ENGINE_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return {"problems": [f"the engine did not report within {ENGINE_TIMEOUT:g} s"]}
    try:
        report = json.loads(done.stdout)
    except ValueError:
        report = None
    if isinstance(report, dict):
        return report
    last = (done.stderr.decode("utf-8", "replace").strip().splitlines() or ["it printed nothing"])[-1]
    return {"problems": [f"the engine cannot be asked (exit code {done.returncode}): {last.strip()}"]}


def _text_report(folder: str | None, template: Path | None) -> tuple[dict[str, Any] | None, list[str]]:
    if folder is None:
        return None, []
    from service.core.text import Tokenizer

    try:
        tokenizer = Tokenizer.load(folder, template=template)
    except InvalidModel as error:
        return None, [str(error)]
    found = {
        "vocab_size": tokenizer.vocab_size,
        "chat": tokenizer.chat,
        "eos_token_ids": list(tokenizer.eos_token_ids),
        "default_sampling": asdict(tokenizer.default_sampling),
        "digest": tokenizer.digest,
    }
    return found, []
