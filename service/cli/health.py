"""Asks a server whether it serves: `whippet health`. Exit code 1 where it does not."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2

from service.cli.channel import INTERRUPTED, USAGE, Parser, ServerAddress, UsageError, complain, explain, probe_code

HEALTH = "127.0.0.1:50053"
READY = "whippet.v1.GenerationService"
NOT_SERVING = 1
_CHECK = "/grpc.health.v1.Health/Check"
_Status = health_pb2.HealthCheckResponse.ServingStatus


def run(argv: Sequence[str]) -> int:
    try:
        flags = _parser().parse_args(argv)
        server = ServerAddress.of(flags)
        with server.channel() as channel:
            return _check(channel, server, flags)
    except UsageError as error:
        return complain(f"{error}; see whippet health --help", USAGE)
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="whippet health",
        description="Reports whether a server serves. Exit code 0: it does; 1: it does not; 2: wrong usage; 3: nobody "
        "answers.",
        allow_abbrev=False,
    )
    ServerAddress.add_operator_flags(parser, HEALTH, "the health port, or another one")
    parser.add_argument(
        "--service", default=READY, metavar="NAME", help="'' asks whether the process lives; default: %(default)s"
    )
    parser.add_argument(
        "--timeout", type=float, default=3.0, metavar="SECONDS", help="for an answer; default: %(default)g"
    )
    return parser


def _check(channel: grpc.Channel, server: ServerAddress, flags: argparse.Namespace) -> int:
    call = channel.unary_unary(
        _CHECK, health_pb2.HealthCheckRequest.SerializeToString, health_pb2.HealthCheckResponse.FromString
    )
    request = health_pb2.HealthCheckRequest(service=flags.service)
    try:
        answer = call(request, timeout=flags.timeout, metadata=server.metadata)
    except grpc.RpcError as error:
        return complain(explain(error, server.address), probe_code(error))
    sys.stdout.write(f"{_Status.Name(answer.status)}\n")
    return 0 if answer.status == _Status.SERVING else NOT_SERVING
