"""The call that README shows works as it stands there, but for the port."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import grpc
import pytest

from service.pb.whippet.v1 import generation_pb2 as pb
from service.pb.whippet.v1.generation_pb2_grpc import GenerationServiceStub
from tests.e2e.conftest import Running

pytestmark = pytest.mark.product

ROOT = Path(__file__).resolve().parents[2]
CALL = re.compile(r"<!-- readme-call -->\s*```sh\n(.*?)```", re.DOTALL)


def test_the_call_is_answered(served_awq: Running, grpcurl: Path) -> None:
    found = CALL.findall((ROOT / "README.md").read_text())
    assert len(found) == 1
    command = found[0].replace("127.0.0.1:50051", served_awq.data)
    assert command != found[0]
    assert command.startswith("grpcurl ")
    done = subprocess.run(
        ["sh", "-c", str(grpcurl) + command.removeprefix("grpcurl")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["text"]
    assert answer["finish"]["reason"].startswith("FINISH_REASON_")
    assert answer["finish"]["usage"]["completionTokens"] > 0


def test_what_make_serve_falls_back_to_fills_no_page(served_awq: Running) -> None:
    with grpc.insecure_channel(served_awq.data) as channel:
        request = pb.GenerateRequest(text="def read_json(path):", stopping=pb.StoppingOptions(ignore_eos=True))
        finish = GenerationServiceStub(channel).Generate(request, timeout=120).finish
        assert finish.reason == pb.FINISH_REASON_LENGTH
        assert finish.usage.completion_tokens == 256
        assert finish.sampling.repetition_penalty == pytest.approx(1.1)
        request.stopping.min_tokens = 260
        assert GenerationServiceStub(channel).Generate(request, timeout=120).finish.usage.completion_tokens == 260
