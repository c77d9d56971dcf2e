"""Every switch turned over and over while streams run: no call fails, no text changes, and each is in force soon."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from service.pb.whippet.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc
from tests.e2e.conftest import Running

pytestmark = pytest.mark.product

FLIPS = 50  # of each switch
LONGEST = 10.0  # seconds until a switch is in force, asked for
PROMPTS = ("def read_json(path):", "import os\n\ndef main():")


@pytest.fixture(params=["fake", "demo"])
def running(request: pytest.FixtureRequest) -> Running:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.fixture
def generation(running: Running) -> Iterator[generation_pb2_grpc.GenerationServiceStub]:
    with grpc.insecure_channel(running.data) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


def text_of(stub: generation_pb2_grpc.GenerationServiceStub, prompt: str) -> str:
    request = generation_pb2.GenerateStreamRequest(text=prompt)
    request.sampling.temperature = 0
    request.stopping.max_tokens = 12
    request.stopping.ignore_eos = True
    request.cache.response = generation_pb2.CACHE_MODE_WRITE  # never answered by what was answered before
    return "".join(message.text for message in stub.GenerateStream(request, timeout=60))


@pytest.mark.proof
def test_each_switch_fifty_times_under_load(
    running: Running, generation: generation_pb2_grpc.GenerationServiceStub
) -> None:
    expected = {prompt: text_of(generation, prompt) for prompt in PROMPTS}
    assert all(expected.values())
    done = threading.Event()

    def ask(prompt: str) -> int:
        asked = 0
        while not done.is_set():
            assert text_of(generation, prompt) == expected[prompt]
            asked += 1
        return asked

    with grpc.insecure_channel(running.admin) as channel, ThreadPoolExecutor(len(PROMPTS)) as pool:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        before = admin.ListOptimizations(admin_pb2.ListOptimizationsRequest(), timeout=60).optimizations
        assert len(before) == 9
        streams = [pool.submit(ask, prompt) for prompt in PROMPTS]
        slowest = 0.0
        try:
            for flip in range(FLIPS):
                for one in before:
                    begun = time.monotonic()
                    change = admin_pb2.SetOptimizationRequest(name=one.name, enabled=one.enabled == bool(flip % 2))
                    told = admin.SetOptimization(change, timeout=60).optimization
                    slowest = max(slowest, time.monotonic() - begun)
                    assert told.enabled is change.enabled
        finally:
            done.set()
        assert all(stream.result() for stream in streams), "each asked at least once"
        assert slowest < LONGEST
        after = admin.ListOptimizations(admin_pb2.ListOptimizationsRequest(), timeout=60).optimizations
        assert [(one.name, one.enabled) for one in after] == [(one.name, one.enabled) for one in before]
