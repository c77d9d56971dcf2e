"""Profiles a running server as collapsed stacks for a flame graph: `whippet profile`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TextIO

import grpc
from google.protobuf.duration_pb2 import Duration

from service.cli.channel import (
    INTERRUPTED,
    USAGE,
    Parser,
    ServerAddress,
    UsageError,
    cancelled_at_ctrl_c,
    complain,
    exit_code,
    explain,
)
from service.pb.whippet.v1 import admin_pb2
from service.pb.whippet.v1.admin_pb2_grpc import AdminServiceStub

_SPARE = 30.0  # seconds beyond the profile's own until the call is given up
_LONGEST = 86_400.0  # seconds; what is too long is the server's to say


def run(argv: Sequence[str]) -> int:
    try:
        flags = _parser().parse_args(argv)
        if not 0 < flags.seconds <= _LONGEST:
            raise UsageError("--seconds must be above 0")
        server = ServerAddress.of(flags)
        with server.channel() as channel, _opened(flags.output) as out:
            return _take(channel, server, flags.seconds, out)
    except UsageError as error:
        return complain(f"{error}; see whippet profile --help", USAGE)
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="whippet profile",
        description="Looks at the stacks of a server's processes a hundred times a second and writes them, one a line "
        "with how often it was seen, for speedscope or a flame graph. They name functions and lines, and nothing of "
        "any request.",
        allow_abbrev=False,
    )
    ServerAddress.add_operator_flags(parser)
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="how long, 60 at most; default: %(default)g"
    )
    parser.add_argument("-o", "--output", default="-", metavar="FILE", help="stdout where it is - or left out")
    return parser


def _opened(path: str) -> nullcontext[TextIO] | TextIO:
    """Opens the output before the profile is taken, not after."""
    if path == "-":
        return nullcontext(sys.stdout)
    try:
        return open(path, "w", encoding="ascii")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def _take(channel: grpc.Channel, server: ServerAddress, seconds: float, out: TextIO) -> int:
    stub = AdminServiceStub(channel)  # type: ignore[no-untyped-call]
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    call = stub.Profile.future(
        admin_pb2.ProfileRequest(duration=duration), timeout=seconds + _SPARE, metadata=server.metadata
    )
    with cancelled_at_ctrl_c(call) as interrupted:
        try:
            _write(call.result(), out)
        except grpc.FutureCancelledError:
            return INTERRUPTED
        except grpc.RpcError as error:
            if interrupted.is_set():
                return INTERRUPTED
            return complain(explain(error, server.address), exit_code(error))
    return 0


def _write(response: admin_pb2.ProfileResponse, out: TextIO) -> None:
    for one in response.processes:
        lines = one.stacks.splitlines()
        out.writelines(f"{one.process};{line}\n" for line in lines)
        found = one.why_not or f"{len(lines)} different stacks"
        sys.stderr.write(f"{one.process}: {found}\n")
