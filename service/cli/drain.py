"""Takes a running server out of service, or back into it: `whippet drain`. Exit code 1 where requests are live when the
time is over; ctrl-C ends the wait and not the drain."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

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
    explain,
    probe_code,
)
from service.pb.whippet.v1 import admin_pb2
from service.pb.whippet.v1.admin_pb2_grpc import AdminServiceStub

STILL_LIVE = 1
_ANSWER = 5.0  # seconds that an answer may take beyond the wait that is asked for
_LONGEST = 86_400.0  # seconds


def run(argv: Sequence[str]) -> int:
    try:
        flags = _parser().parse_args(argv)
        if flags.timeout is not None and not (flags.wait and 0 < flags.timeout <= _LONGEST):
            raise UsageError("--timeout goes with --wait and must be above 0")
        server = ServerAddress.of(flags)
        with server.channel() as channel:
            stub = AdminServiceStub(channel)  # type: ignore[no-untyped-call]
            return _undo(stub, server) if flags.undo else _drain(stub, server, flags)
    except UsageError as error:
        return complain(f"{error}; see whippet drain --help", USAGE)
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="whippet drain",
        description="Takes a server out of service: health reports NOT_SERVING, and after drain.delay new requests are "
        "refused. It stays up. Exit code 0: done; 1: requests are still live; 2: wrong usage; 3: no answer.",
        allow_abbrev=False,
    )
    ServerAddress.add_operator_flags(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--wait", action="store_true", help="until the last request has ended")
    what.add_argument("--undo", action="store_true", help="back into service")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="wait no longer; unset: as long as it takes")
    return parser


def _drain(stub: AdminServiceStub, server: ServerAddress, flags: argparse.Namespace) -> int:
    request, deadline = admin_pb2.DrainRequest(), None
    if flags.timeout is not None or not flags.wait:
        wait = Duration()
        wait.FromMilliseconds(round((flags.timeout or 0.0) * 1000))
        request, deadline = admin_pb2.DrainRequest(timeout=wait), (flags.timeout or 0.0) + _ANSWER
    call = stub.Drain.future(request, timeout=deadline, metadata=server.metadata)
    with cancelled_at_ctrl_c(call) as interrupted:
        try:
            answer = call.result()
        except grpc.FutureCancelledError:
            return INTERRUPTED
        except grpc.RpcError as error:
            return INTERRUPTED if interrupted.is_set() else complain(explain(error, server.address), probe_code(error))
    drained = not answer.remaining and not answer.admitting
    admitting = ", requests are still admitted" if answer.admitting else ""
    sys.stdout.write("drained\n" if drained else f"{answer.remaining} requests are live{admitting}\n")
    return 0 if drained or not flags.wait else STILL_LIVE


def _undo(stub: AdminServiceStub, server: ServerAddress) -> int:
    try:
        stub.Undrain(admin_pb2.UndrainRequest(), timeout=_ANSWER, metadata=server.metadata)
    except grpc.RpcError as error:
        return complain(explain(error, server.address), probe_code(error))
    sys.stdout.write("in service\n")
    return 0
