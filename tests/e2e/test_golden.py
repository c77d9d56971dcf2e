"""What the demo model says to a few questions, word for word, greedily, in float32 on a CPU.

The best token leads the second best by at least 0.1 in log-probability at every place, which is checked, so that no
order of summation changes the text. A newly trained demo model says other things: choose prompts with that lead again.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import grpc
import pytest

from service.pb.whippet.v1 import generation_pb2 as pb
from service.pb.whippet.v1.generation_pb2_grpc import GenerationServiceStub

pytestmark = pytest.mark.product

LEAD = 0.1
READ_JSON = (
    "\"\"\"Return the Json's Json's algorithm used by Json's algorithm.\n\nThis module provides"  # to max_tokens
)
GOLDEN = {
    "text": (pb.GenerateRequest(text="def read_json(path):\n"), READ_JSON, pb.FINISH_REASON_LENGTH),
    "code": (
        pb.GenerateRequest(text="try:\n    import ssl\nexcept "),
        "EROFError:\n    SSLSocket = ssl.SSLSocket\nelse:\n    SSLSocket = ssl.",
        pb.FINISH_REASON_LENGTH,
    ),
    "greeting": (
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="Hello")])),
        "Hello! Ask me about a module, a class or a function of Python's standard library.",
        pb.FINISH_REASON_STOP,
    ),
    "question": (
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="What does os.path.join do?")])),
        "Return a path to a file path.",
        pb.FINISH_REASON_STOP,
    ),
}


@pytest.fixture(scope="module")
def stub(demo: object) -> GenerationServiceStub:
    return GenerationServiceStub(grpc.insecure_channel(demo.data))  # type: ignore[attr-defined]


def greedy(request: pb.GenerateRequest) -> pb.GenerateRequest:
    whole = pb.GenerateRequest()
    whole.CopyFrom(request)
    whole.sampling.temperature = 0
    whole.sampling.repetition_penalty = 1  # the demo model in four bits has another default
    whole.stopping.max_tokens = 24
    whole.output.logprobs = 2
    whole.output.token_ids = True
    return whole


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_text(stub: GenerationServiceStub, name: str) -> None:
    request, text, reason = GOLDEN[name]
    answer = stub.Generate(greedy(request), timeout=60)
    assert (answer.text, answer.finish.reason) == (text, reason)
    assert min(place.top[0].logprob - place.top[1].logprob for place in answer.logprobs) >= LEAD
    assert answer.finish.usage.completion_tokens == len(answer.token_ids) == len(answer.logprobs)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_stream_says_the_same(stub: GenerationServiceStub, name: str) -> None:
    request, text, reason = GOLDEN[name]
    streamed = pb.GenerateStreamRequest.FromString(greedy(request).SerializeToString())
    messages = list(stub.GenerateStream(streamed, timeout=60))
    assert "".join(message.text for message in messages) == text
    assert len(messages) > 4
    assert messages[-1].finish.reason == reason


# Led by at least 0.18, which the packed kernels' rounding of activations to bfloat16 does not bridge.
FOUR_BITS = {
    "text": (GOLDEN["text"][0], READ_JSON),
    "code": GOLDEN["code"][:2],
    "greeting": GOLDEN["greeting"][:2],
    "method": (
        pb.GenerateRequest(text="def __repr__(self):"),
        '\n        return "<%s %r>" % (self.__class__.__name__, self.name, self.name,',
    ),
}


@pytest.mark.isa
@pytest.mark.parametrize("name", FOUR_BITS)
def test_four_bits_say_their_own(served_awq: object, name: str) -> None:
    stub = GenerationServiceStub(grpc.insecure_channel(served_awq.data))  # type: ignore[attr-defined]
    request, text = FOUR_BITS[name]
    answer = stub.Generate(greedy(request), timeout=60)
    assert answer.text == text
    assert min(place.top[0].logprob - place.top[1].logprob for place in answer.logprobs) >= LEAD


def test_all_at_once_say_the_same(stub: GenerationServiceStub) -> None:
    calls = [(stub.Generate.future(greedy(GOLDEN[name][0]), timeout=60), GOLDEN[name][1]) for name in [*GOLDEN] * 4]
    for call, text in calls:
        assert call.result().text == text


def test_a_stop_string_cuts_the_golden_text(stub: GenerationServiceStub) -> None:
    request = greedy(GOLDEN["text"][0])
    request.stopping.stop_strings.extend([".\n\nThis", "never"])
    answer = stub.Generate(request, timeout=60)
    assert answer.text == READ_JSON.partition(".\n\nThis")[0]
    assert answer.finish.reason == pb.FINISH_REASON_STOP_STRING
    assert answer.finish.stop_string == ".\n\nThis"
    request.stopping.include_stop = True
    assert stub.Generate(request, timeout=60).text == answer.text + ".\n\nThis"


def test_whippet_generate_says_the_same(demo: object, whippet: Path) -> None:
    address = demo.data  # type: ignore[attr-defined]
    command = [whippet, "generate", "--address", address, "--temperature", "0", "--max-tokens", "24"]
    plain = subprocess.run([*command, "def read_json(path):\n"], capture_output=True, text=True, timeout=60)
    assert (plain.returncode, plain.stdout, plain.stderr) == (0, READ_JSON + "\n", "")
    chat = subprocess.run([*command, "--chat", "--json", "Hello"], capture_output=True, text=True, timeout=60)
    answer = json.loads(chat.stdout)
    assert answer["text"] == GOLDEN["greeting"][1]
    assert answer["finish"]["reason"] == "stop"
