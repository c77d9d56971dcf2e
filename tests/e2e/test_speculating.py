"""A stream that speculates, beside callers who want the log-probabilities of their prompts: nobody gets anything but
what they get alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from service.pb.whippet.v1 import generation_pb2 as pb
from service.pb.whippet.v1.generation_pb2_grpc import GenerationServiceStub
from tests.e2e.conftest import Serve

pytestmark = pytest.mark.product

REPEATING = "def add(a, b):\n    return a + b\n\n\n" * 12  # what prompt lookup proposes is mostly right
SCORED = "import os\nimport sys\n\n\ndef main(path):\n    return os.path.join(path, 'x')\n" * 8
STREAMS = 6


@pytest.fixture(scope="module", params=["demo", pytest.param("demo-awq", marks=pytest.mark.proof)])
def stub(request: pytest.FixtureRequest, serve: Serve) -> Iterator[GenerationServiceStub]:
    flags = ("--device=cpu", "--dtype=float32", "--scheduler.threads=1", "--optimizations.response-cache=false")
    with (
        serve(f"--model=models/{request.param}", *flags, "--cache.semantic.mode=off") as running,
        grpc.insecure_channel(running.data) as channel,
    ):
        yield GenerationServiceStub(channel)


def stream(stub: GenerationServiceStub) -> tuple[list[int], int]:
    """Ids of an answer that speculates, and how many were proposed. An error of the call is raised."""
    request = pb.GenerateStreamRequest(text=REPEATING)
    request.sampling.temperature, request.sampling.repetition_penalty = 0, 1
    request.stopping.max_tokens, request.stopping.ignore_eos = 64, True
    request.output.token_ids = True
    messages = list(stub.GenerateStream(request, timeout=120))
    ids = [token_id for message in messages for token_id in message.token_ids]
    return ids, messages[-1].finish.usage.draft_proposed


def score(stub: GenerationServiceStub) -> tuple[list[int], list[float]]:
    """Ids of an answer, and log-probabilities of its prompt."""
    request = pb.GenerateRequest(text=SCORED)
    request.sampling.temperature, request.sampling.repetition_penalty = 0, 1
    request.stopping.max_tokens, request.stopping.ignore_eos = 4, True
    request.output.token_ids, request.output.prompt_logprobs = True, 2
    answer = stub.Generate(request, timeout=120)
    return list(answer.token_ids), [one.logprob for one in answer.prompt_logprobs]


def test_prompts_are_scored_beside_a_stream_that_speculates(stub: GenerationServiceStub) -> None:
    ids, proposed = stream(stub)
    assert proposed > 0, "else nothing is proved"
    said, scores = score(stub)
    done = threading.Event()

    def score_on() -> int:
        found = 0
        while not done.is_set():
            again, told = score(stub)
            assert again == said
            assert told == pytest.approx(scores, abs=1e-3)
            found += 1
        return found

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(score_on)
        try:
            streams = [stream(stub) for _ in range(STREAMS)]
        finally:
            done.set()
        assert other.result() > 0
    assert [one for one, _ in streams] == [ids] * STREAMS
    assert sum(count for _, count in streams) > 0
