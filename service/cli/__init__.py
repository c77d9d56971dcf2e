"""Implements the command `whippet`: one module per subcommand, imported only when needed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from service.version import version

if TYPE_CHECKING:
    import argparse

# subcommand → module with `run(argv) -> exit code`, and its line in --help
COMMANDS = {
    "serve": ("service.cli.serve", "serve a model over gRPC"),
    "rank": ("service.cli.rank", "compute a part of a model that a server on another host serves"),
    "generate": ("service.cli.generate", "ask a server, once or in a conversation, and stream its answers"),
    "doctor": ("service.cli.doctor", "what this machine has, and how a model would be served on it"),
    "top": ("service.cli.top", "what a running server does, live on the terminal"),
    "health": ("service.cli.health", "ask a server whether it serves, as a probe does"),
    "drain": ("service.cli.drain", "take a server out of service, or back into it"),
    "profile": ("service.cli.profile", "where a running server spends its time, as stacks for a flame graph"),
    "bench": ("service.cli.bench", "measure: one stream, load, drafts, caches, a ladder of optimisations, peers"),
    "rollback": ("service.cli.rollback", "turn one optimisation off on a running server, and see what that changes"),
    "quantize": ("service.cli.quantize", "make 4-bit or 8-bit weights of a model folder"),
    "evaluate": ("service.cli.evaluate", "perplexity of a model, and its distance from another"),
    "convert": ("service.cli.convert", "make safetensors of a model folder with pickled weights"),
    "prebuild": ("service.cli.prebuild", "compile ahead what servers compile at their first start"),
    "cache": ("service.cli.cache", "replay a trace through the caches: what would they have answered"),
    "replay": ("service.cli.replay", "repeat the steps that led to a fault, from the file that the engine wrote"),
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        module, _ = COMMANDS[words[0]]
        code: int = importlib.import_module(module).run(words[1:])
        return code
    _parser().parse_args(words)
    return 2


def _parser() -> argparse.ArgumentParser:
    import argparse  # not for a server, which hears signals the sooner

    lines = "\n".join(f"  {name:<10}{text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="whippet",
        usage="whippet [--help | --version] COMMAND ...",
        description="A gRPC streaming server for one language model.",
        epilog=f"commands:\n{lines}\n\n`whippet COMMAND --help` lists the flags of each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"whippet {version()}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser
