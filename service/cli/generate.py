"""Streams the answer to a prompt to stdout: `whippet generate`. Without a prompt, on a terminal, holds a conversation.
Exit code 141 where stdout was closed by its reader."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import grpc

from service.cli import constraint
from service.cli.asking import LIMIT, Asker
from service.cli.channel import (
    INTERRUPTED,
    USAGE,
    Parser,
    ServerAddress,
    UsageError,
    complain,
    exit_code,
    explain,
)
from service.cli.conversation import Conversation, ConversationTurns
from service.cli.output import TerminalOutput
from service.pb.whippet.v1 import generation_pb2 as pb

BROKEN_PIPE = 141
_SAMPLING = (  # flags that are fields of SamplingOptions
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)


def run(argv: Sequence[str]) -> int:
    try:
        flags = _parser().parse_args(argv)
        server = ServerAddress.of(flags)
        request = _request(flags)
        if _converses(flags):
            with server.channel() as channel:
                return Conversation(channel, server, request, ConversationTurns(flags.system), flags.timeout).run()
        _set_prompt(request, flags)
        with server.channel() as channel:
            return _ask(channel, server, request, flags)
    except UsageError as error:
        return complain(f"{error}; see whippet generate --help", USAGE)
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="whippet generate",
        description="Asks a server and streams its answer to stdout. Without a prompt, on a terminal: a conversation, "
        "through the model's chat template.",
        epilog="Exit code: 0 where all is answered; 2: wrong usage; 64 + gRPC code: refused or failed; 130: ctrl-C.",
        allow_abbrev=False,
    )
    parser.add_argument("prompt", nargs="?", help="what to ask; - reads it from stdin, as does none in a pipe")
    parser.add_argument(
        "--chat", action="store_true", help="ask as a user's message, through the model's chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before it; means --chat")
    parser.add_argument(
        "--template-argument",
        action="append",
        default=[],
        type=_template_argument,
        metavar="NAME=JSON",
        help="a variable of the chat template, as enable_thinking=false; means --chat; may be repeated",
    )
    parser.add_argument("--model", default="", metavar="NAME", help="default: the model that is served")
    _add_sampling(parser)
    constraint.add_flags(parser)
    parser.add_argument(
        "--n", type=int, metavar="N", help="this many answers, one after the other; drawn with --seed, --seed + 1, …"
    )
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after this long")
    parser.add_argument("--json", action="store_true", help="print one JSON object once the answer is complete")
    ServerAddress.add_flags(parser)
    return parser


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help=f"the most tokens; default: {LIMIT}, or what the context leaves"
    )
    parser.add_argument("--min-tokens", type=int, metavar="N", help="no stop of any kind before this many tokens")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 takes the most likely token")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="the most likely tokens that have probability P together"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="the K most likely tokens; 0 keeps all")
    parser.add_argument("--min-p", type=float, metavar="P", help="no token less likely than P times the best")
    parser.add_argument("--repetition-penalty", type=float, metavar="R", help="of tokens in prompt or answer; 1 is off")
    parser.add_argument("--presence-penalty", type=float, metavar="R", help="of tokens in the answer, once; 0 is off")
    parser.add_argument(
        "--frequency-penalty", type=float, metavar="R", help="of tokens in the answer, each time; 0 is off"
    )
    parser.add_argument(
        "--logit-bias",
        action="append",
        default=[],
        type=_logit_bias,
        metavar="ID=BIAS",
        help="add to the logit of a token id; may be repeated",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop there; may be repeated")
    parser.add_argument(
        "--stop-token", action="append", default=[], type=int, metavar="ID", help="stop at this id; may be repeated"
    )
    parser.add_argument(
        "--ignore-eos", action="store_const", const=True, help="go on past the model's end-of-text tokens"
    )


def _logit_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    return int(token), float(bias)


def _template_argument(text: str) -> tuple[str, Any]:
    name, found, value = text.partition("=")
    if not name or not found:
        raise ValueError
    try:
        return name, json.loads(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is no JSON: a text needs its quotes") from None


def _request(flags: argparse.Namespace) -> pb.GenerateStreamRequest:
    try:
        sampling = {name: getattr(flags, name) for name in _SAMPLING}
        request = pb.GenerateStreamRequest(
            model=flags.model,
            sampling=pb.SamplingOptions(**sampling, logit_bias=dict(flags.logit_bias)),
            stopping=pb.StoppingOptions(
                max_tokens=flags.max_tokens,
                min_tokens=flags.min_tokens,
                stop_strings=flags.stop,
                stop_token_ids=flags.stop_token,
                ignore_eos=flags.ignore_eos,
            ),
            constraint=constraint.constraint_of(flags),
            n=flags.n,
        )
        if flags.template_argument:
            request.chat.template_arguments.update(dict(flags.template_argument))
    except ValueError as error:  # beyond 32 or 64 bits, or an argument that is not UTF-8
        raise UsageError(str(error)) from None
    return request


def _converses(flags: argparse.Namespace) -> bool:
    if flags.prompt is not None or not sys.stdin.isatty():
        return False
    if flags.json or not sys.stdout.isatty():
        raise UsageError("no prompt: give one, or pipe it in; a conversation is for a terminal, without --json")
    if flags.n is not None:
        raise UsageError("--n needs a prompt: a conversation goes on from one answer")
    return True


def _set_prompt(request: pb.GenerateStreamRequest, flags: argparse.Namespace) -> None:
    prompt = _piped() if flags.prompt in (None, "-") else flags.prompt
    try:
        if flags.chat or flags.system is not None or flags.template_argument:
            request.chat.MergeFrom(ConversationTurns(flags.system).asked(prompt))
        else:
            request.text = prompt
    except ValueError as error:  # an argument that is not UTF-8
        raise UsageError(str(error)) from None


def _piped() -> str:
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError("the prompt on stdin is not UTF-8") from None
    return text.removesuffix("\n").removesuffix("\r")  # echo's, and editors'


def _ask(
    channel: grpc.Channel, server: ServerAddress, request: pb.GenerateStreamRequest, flags: argparse.Namespace
) -> int:
    out = TerminalOutput(live=not flags.json, answers=max(1, request.n))
    try:
        ended = Asker(channel, server, flags.timeout).ask(request, out)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the interpreter's last flush meets no broken pipe
        return BROKEN_PIPE
    if ended.interrupted:
        return INTERRUPTED
    return 0 if ended.error is None else complain(explain(ended.error, server.address), exit_code(ended.error))
