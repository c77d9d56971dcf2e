"""Asks a server one question and prints the answer as it arrives."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from service.cli.channel import ServerAddress, cancelled_at_ctrl_c, complain, wrong_fields
from service.cli.output import TerminalOutput
from service.pb.whippet.v1 import generation_pb2 as pb
from service.pb.whippet.v1.generation_pb2_grpc import GenerationServiceStub

LIMIT = 512  # tokens of an answer where the command line names none
_FIELD = "stopping.max_tokens"


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """Without an `error`, the answer is complete; `interrupted` by ctrl-C is an error too."""

    error: grpc.RpcError | None
    interrupted: bool


class Asker:
    """`timeout`: seconds for each answer."""

    def __init__(self, channel: grpc.Channel, server: ServerAddress, timeout: float | None) -> None:
        self._stub = GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        self._server = server
        self._timeout = timeout

    def ask(self, request: pb.GenerateStreamRequest, out: TerminalOutput) -> CallOutcome:
        """Without a limit in the request, asks for LIMIT tokens, and prints where that cuts the answer short; asks
        without one where the server refuses LIMIT."""
        if request.stopping.HasField("max_tokens"):
            return self._stream(request, out)
        limited = pb.GenerateStreamRequest()
        limited.CopyFrom(request)
        limit = limited.stopping.max_tokens = max(LIMIT, request.stopping.min_tokens)
        ended = self._stream(limited, out)
        if ended.error is not None and _FIELD in wrong_fields(ended.error):
            return self._stream(request, out)
        if ended.error is None and out.cut_short:
            complain(f"stopped after {limit} tokens, the default of --max-tokens", 0)
        return ended

    def _stream(self, request: pb.GenerateStreamRequest, out: TerminalOutput) -> CallOutcome:
        call = self._stub.GenerateStream(request, timeout=self._timeout, metadata=self._server.metadata)
        with cancelled_at_ctrl_c(call) as interrupted:
            try:
                for message in call:
                    out.take(message)
                out.close()
            except grpc.RpcError as error:
                out.end_line()
                return CallOutcome(error, interrupted.is_set())
            finally:
                call.cancel()
            return CallOutcome(None, interrupted.is_set())
