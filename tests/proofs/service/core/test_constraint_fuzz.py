"""Constraints that nobody would write, to a whole server: none of them ends the engine or is an INTERNAL.

Half a minute by default; FUZZ_SECONDS=1200 for twenty. FUZZ_SEED=n begins with another seed; a failure names its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from service.pb.whippet.v1 import generation_pb2 as pb
from tests.proofs.service.core.strange_constraints import Strange
from tests.service.conftest import Server, ask

_log = logging.getLogger(__name__)
SECONDS = float(os.environ.get("FUZZ_SECONDS", "30"))
FIRST_SEED = int(os.environ.get("FUZZ_SEED", "1"))
CALLERS = 4
C = grpc.StatusCode
FINE = {C.OK, C.INVALID_ARGUMENT, C.FAILED_PRECONDITION, C.DEADLINE_EXCEEDED, C.RESOURCE_EXHAUSTED, C.UNIMPLEMENTED}
Serve = Callable[..., contextlib.AbstractContextManager[Server]]


def outcome(server: Server, seed: int) -> tuple[grpc.StatusCode, str]:
    drawn = Strange(seed).draw()
    try:
        request = ask("hello", 24, constraint=drawn)
        request.sampling.temperature, request.sampling.seed = 1.0, seed
    except (UnicodeEncodeError, ValueError):  # what protobuf's strings cannot hold is not sent
        return C.INVALID_ARGUMENT, ""
    try:
        server.generation.Generate(request, timeout=30)
    except grpc.RpcError as error:
        return error.code(), str(error.details())
    return C.OK, ""


@pytest.mark.timeout(SECONDS + 240)
def test_strange_constraints_are_answers_or_refusals(serve: Serve) -> None:
    counted: Counter[grpc.StatusCode] = Counter()
    with serve("--fake.step-time=0.001", "--log-level=warning") as server:
        engine = server.engine_pid()
        end = time.monotonic() + SECONDS

        def caller(number: int) -> None:
            seed = FIRST_SEED + number
            while time.monotonic() < end:
                code, message = outcome(server, seed)
                counted[code] += 1
                assert code in FINE, f"seed {seed}: {code} {message}\n{server.log.read_text()[-2000:]}"
                seed += CALLERS

        with ThreadPoolExecutor(CALLERS) as callers:
            for _ in callers.map(caller, range(CALLERS)):
                pass
        _log.info("%s", {code.name: count for code, count in counted.items()})
        assert server.engine_pid() == engine
        assert server.load().restarts == 0
        assert isinstance(server.generation.Generate(ask("hello", 2), timeout=60), pb.GenerateResponse)
    assert counted[C.OK] > 0
    assert counted[C.INVALID_ARGUMENT] > 0
