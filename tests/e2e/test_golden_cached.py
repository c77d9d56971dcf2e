"""The golden texts of the demo model, generated and out of the cache, word for word."""

from __future__ import annotations

import time

import grpc
import pytest

from service.pb.whippet.v1 import admin_pb2
from service.pb.whippet.v1 import generation_pb2 as pb
from service.pb.whippet.v1.admin_pb2_grpc import AdminServiceStub
from service.pb.whippet.v1.generation_pb2_grpc import GenerationServiceStub
from tests.e2e.conftest import Running
from tests.e2e.test_golden import GOLDEN, greedy

pytestmark = pytest.mark.product


def say(stub: GenerationServiceStub, request: pb.GenerateRequest) -> tuple[pb.GenerateResponse, str]:
    response, call = stub.Generate.with_call(request, timeout=60)
    return response, str(dict(call.initial_metadata())["x-cache"])


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_text_out_of_the_cache(demo: Running, name: str) -> None:
    request, text, reason = GOLDEN[name]
    whole = greedy(request)
    whole.output.ClearField("logprobs")
    with grpc.insecure_channel(demo.data) as channel:
        stub = GenerationServiceStub(channel)
        whole.cache.response = whole.cache.semantic = pb.CACHE_MODE_OFF
        plain, header = say(stub, whole)
        assert (header, plain.text, plain.finish.reason) == ("off", text, reason)
        whole.ClearField("cache")
        first, _ = say(stub, whole)
        reading = pb.GenerateRequest.FromString(whole.SerializeToString())
        reading.cache.response = pb.CACHE_MODE_READ
        end = time.monotonic() + 60
        while say(stub, reading)[1] != "hit-response":
            assert time.monotonic() < end, "never stored"
        second, header = say(stub, whole)
        assert header == "hit-response"
        for answer in (first, second):
            assert (answer.text, answer.finish.reason) == (text, reason)
            assert list(answer.token_ids) == list(plain.token_ids)
        streamed = pb.GenerateStreamRequest.FromString(whole.SerializeToString())
        messages = list(stub.GenerateStream(streamed, timeout=60))
        assert "".join(message.text for message in messages) == text
        assert messages[-1].finish.cache_source == pb.CACHE_SOURCE_RESPONSE


@pytest.mark.parametrize("switch", ["response_cache", "semantic_cache"])
def test_golden_text_with_either_cache_off(demo: Running, switch: str) -> None:
    with grpc.insecure_channel(demo.data) as channel, grpc.insecure_channel(demo.admin) as admin_channel:
        stub, admin = GenerationServiceStub(channel), AdminServiceStub(admin_channel)
        try:
            admin.SetOptimization(admin_pb2.SetOptimizationRequest(name=switch, enabled=False), timeout=60)
            for request, text, _ in GOLDEN.values():
                whole = greedy(request)
                whole.output.ClearField("logprobs")
                assert say(stub, whole)[0].text == text
        finally:
            admin.SetOptimization(admin_pb2.SetOptimizationRequest(name=switch, enabled=True), timeout=60)
