"""`whippet generate`: sends a prompt to a server and streams the answer to the terminal.

Exit codes: 0; 2 for a command line that makes no sense; 64 and the gRPC code for a refusal; 130 for ctrl-C; 141 where
stdout was closed by its reader.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from service.cli.channel import (
    INTERRUPTED,
    USAGE,
    Parser,
    Server,
    UsageError,
    cancelled_at_ctrl_c,
    complain,
    exit_code,
    explain,
)
from service.pb.whippet.v1 import generation_pb2 as pb
from service.pb.whippet.v1.generation_pb2_grpc import GenerationServiceStub

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
        server = Server.of(flags)
        request = _request(flags)
        with server.channel() as channel:
            return _ask(channel, server, request, flags)
    except UsageError as error:
        return complain(f"{error}; see whippet generate --help", USAGE)
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="whippet generate", description="Asks a server and streams its answer to stdout.", allow_abbrev=False
    )
    parser.add_argument("prompt", nargs="?", default="-", help="what to ask; from stdin where it is - or left out")
    parser.add_argument("--chat", action="store_true", help="a user's message, through the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="a system message before it; means --chat")
    parser.add_argument("--model", default="", help="by name; the one that is served where left out")
    parser.add_argument("--max-tokens", type=int, metavar="N")
    parser.add_argument("--min-tokens", type=int, metavar="N")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 takes the most likely token")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--min-p", type=float, metavar="P")
    parser.add_argument("--repetition-penalty", type=float, metavar="R", help="1 is off")
    parser.add_argument("--presence-penalty", type=float, metavar="R", help="0 is off")
    parser.add_argument("--frequency-penalty", type=float, metavar="R", help="0 is off")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop there; may be repeated")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after this long")
    parser.add_argument("--json", action="store_true", help="print one JSON object once the answer is complete")
    Server.add_flags(parser)
    return parser


def _request(flags: argparse.Namespace) -> pb.GenerateStreamRequest:
    """With the flags that were given; the server validates them."""
    prompt = _prompt(flags.prompt)
    try:
        request = pb.GenerateStreamRequest(
            model=flags.model,
            sampling=pb.SamplingOptions(**{name: getattr(flags, name) for name in _SAMPLING}),
            stopping=pb.StoppingOptions(
                max_tokens=flags.max_tokens, min_tokens=flags.min_tokens, stop_strings=flags.stop
            ),
        )
        if flags.chat or flags.system is not None:
            system = [] if flags.system is None else [pb.ChatMessage(role="system", content=flags.system)]
            messages = [*system, pb.ChatMessage(role="user", content=prompt)]
            request.chat.CopyFrom(pb.Chat(messages=messages))
        else:
            request.text = prompt
    except ValueError as error:  # beyond 32 or 64 bits, or an argument that is not UTF-8
        raise UsageError(str(error)) from None
    return request


def _prompt(given: str) -> str:
    if given != "-":
        return given
    if sys.stdin.isatty():
        raise UsageError("no prompt: give one, or pipe it in")
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError("the prompt on stdin is not UTF-8") from None
    return text.removesuffix("\n").removesuffix("\r")  # echo's, and editors'


def _ask(channel: grpc.Channel, server: Server, request: pb.GenerateStreamRequest, flags: argparse.Namespace) -> int:
    stub = GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
    call = stub.GenerateStream(request, timeout=flags.timeout, metadata=server.metadata)
    out = _Out(live=not flags.json)
    with cancelled_at_ctrl_c(call) as interrupted:
        try:
            for message in call:
                out.take(message)
            out.close()
        except grpc.RpcError as error:
            out.end_line()
            if not interrupted.is_set():
                return complain(explain(error, server.address), exit_code(error))
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the interpreter's last flush meets no broken pipe
            return BROKEN_PIPE
        finally:
            call.cancel()
        return INTERRUPTED if interrupted.is_set() else 0


class _Out:
    """The answer on stdout: piece by piece, or as one JSON object."""

    def __init__(self, live: bool) -> None:
        self._live = live
        self._texts: list[str] = []
        self._info = pb.PromptInfo()
        self._finish: pb.Finish | None = None
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")

    def take(self, message: pb.GenerateStreamResponse) -> None:
        if message.HasField("prompt_info"):
            self._info = message.prompt_info
        if message.HasField("finish"):
            self._finish = message.finish
        if message.text:
            self._texts.append(message.text)
            if self._live:
                sys.stdout.write(message.text)
                sys.stdout.flush()

    def close(self) -> None:
        """The answer is complete."""
        if not self._live:
            sys.stdout.write(json.dumps(self._object(), ensure_ascii=False))
        sys.stdout.write("\n")
        sys.stdout.flush()

    def end_line(self) -> None:
        """Lets the next output on the terminal begin on a new line."""
        if self._live and self._texts and not self._texts[-1].endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()

    def _object(self) -> dict[str, Any]:
        finish = self._finish or pb.Finish()
        stop = finish.WhichOneof("matched_stop")
        usage, timings = finish.usage, finish.timings
        return {
            "request_id": self._info.request_id,
            "model": self._info.model,
            "text": "".join(self._texts),
            "finish": {
                "reason": pb.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower(),
                "stop": getattr(finish, stop) if stop else None,
            },
            "usage": {field.name: getattr(usage, field.name) for field in usage.DESCRIPTOR.fields},
            "timings": {field.name: _seconds(getattr(timings, field.name)) for field in timings.DESCRIPTOR.fields},
            "cache_source": pb.CacheSource.Name(finish.cache_source).removeprefix("CACHE_SOURCE_").lower(),
            "sampling": {
                field.name: _short(getattr(finish.sampling, field.name))
                for field in finish.sampling.DESCRIPTOR.fields
                if field.name != "logit_bias"
            },
        }


def _short(value: float) -> float:
    """A 32-bit float as it was written: 0.7, not 0.699999988079071."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
