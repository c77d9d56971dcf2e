"""What callers, probes and whoever started the server see of an engine that hangs or may not be served any more."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.fake import Fault
from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.conftest import PATIENCE, ROOT, Refusal, Server, ask, ask_stream, refused
from tests.service.drained import one_at_most_in_the_gap
from tests.service.scraped import page_of, value
from tests.waiting import wait_for

pytestmark = pytest.mark.product

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
SERVING = health_pb2.HealthCheckResponse.SERVING


def health_of(server: Server, name: str) -> int:
    with grpc.insecure_channel(server.health) as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=60).status)


def readiness(server: Server) -> int:
    return health_of(server, "whippet.v1.GenerationService")


def liveness(server: Server) -> int:
    return health_of(server, "")


@pytest.mark.proof
def test_a_stopped_engine_is_found_out_by_callers_who_give_up_early(serve: Serve) -> None:
    with serve("--engine.hang-timeout=1") as server:
        pid = server.engine_pid()
        os.kill(pid, signal.SIGSTOP)
        codes = set()
        while readiness(server) == SERVING:
            codes.add(server.generation.GenerateStream(ask_stream("x", 50), timeout=0.1).code())
        assert codes <= {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}
        refusal = refused(server.generation.Generate, ask("x", 5))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_UNAVAILABLE")
        assert refusal.retry_ms > 0
        wait_for(lambda: readiness(server) == SERVING)
        assert server.generation.Generate(ask("x", 5), timeout=PATIENCE).text


def test_liveness_fails_where_restarts_do_and_comes_back(serve: Serve) -> None:
    """So that whoever started the server starts it again as a whole, on another machine perhaps."""
    with serve("--engine.give-up=1") as server:
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert liveness(server) == SERVING, "one death is no restart that failed"
        while liveness(server) == SERVING:
            for pid in server.engine_pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        wait_for(lambda: liveness(server) == readiness(server) == SERVING)
        assert server.generation.Generate(ask("x", 5), timeout=PATIENCE).text


POISON = (0, int(Fault.CRASH), 4)  # the engine process ends when four ids were generated


@pytest.mark.parametrize("cache", ["false", "true"], ids=["each by itself", "generated once for all"])
def test_a_request_that_kills_engines_is_refused_however_many_send_it(serve: Serve, cache: str) -> None:
    """After two restarts; those beside it get the answers that they always get."""
    flags = (f"--optimizations.response-cache={cache}", "--fake.faults=true", "--fake.step-time=0.002")

    def insist(text: str = "", **prompt: object) -> tuple[grpc.StatusCode, str]:
        """As a client with a retry policy: what it is told in the end."""
        while True:
            try:
                answer = server.generation.Generate(ask(text, 40, **prompt), timeout=PATIENCE)
                return grpc.StatusCode.OK, answer.text
            except grpc.RpcError as error:
                refusal = Refusal.of(error)
                if refusal.code is not grpc.StatusCode.UNAVAILABLE:
                    return refusal.code, refusal.reason
                time.sleep(refusal.retry_ms / 10_000)

    with serve(*flags) as server, ThreadPoolExecutor(16) as pool:
        alone = [insist(f"mate {number}") for number in range(8)]
        poison = [pool.submit(insist, token_ids=pb.TokenIds(ids=POISON)) for _ in range(8)]
        mates = [pool.submit(insist, f"mate {number}") for number in range(8)]
        assert [one.result() for one in mates] == alone
        assert {one.result() for one in poison} == {(grpc.StatusCode.FAILED_PRECONDITION, "QUARANTINED")}
        assert server.log.read_text().count("another is started") == 2
        assert value(page_of(server), "requests_quarantined_total") == 1


def test_a_replaced_folder_ends_the_server_with_one_line(serve: Serve, tmp_path: Path) -> None:
    for file in (ROOT / "models" / "demo").glob("*.json"):
        shutil.copy(file, tmp_path)
    with serve(f"--model={tmp_path}") as server:
        with (tmp_path / "tokenizer_config.json").open("a") as file:
            file.write("\n")
        assert server.generation.Generate(ask("x", 5), timeout=60).HasField("finish")  # what is loaded goes on
        os.kill(server.engine_pid(), signal.SIGKILL)
        codes = []
        while server.process.poll() is None:
            codes.append(refused(server.generation.Generate, ask("x", 5)).code)
        assert set(codes) <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
        assert one_at_most_in_the_gap(codes), codes
        assert server.process.wait(PATIENCE) == 3
        lines = [line for line in server.log.read_text().splitlines() if line.startswith("whippet: ")]
        assert len(lines) == 1
        assert str(tmp_path) in lines[0]
        assert "replaced" in lines[0]
        assert "Traceback" not in server.log.read_text()
