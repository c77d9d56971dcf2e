"""What comes with an answer: log-probabilities of its prompt, the texts of tokens, special tokens, and more answers."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from service.pb.whippet.v1 import admin_pb2, model_pb2
from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.conftest import PATIENCE, Server, ask, ask_stream, refused

pytestmark = pytest.mark.product

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
PROMPT = "what is said before, which takes more than one page of tokens. " * 3
DRAWN = pb.SamplingOptions(temperature=1, seed=7)


@pytest.fixture(scope="module")
def narrow(serve: Serve) -> Iterator[Server]:
    """Prompts are fed in pieces; the response cache is on; four generations at most, running or waiting. An endless one
    takes 40 s."""
    flags = ("--optimizations.response-cache=true", "--scheduler.max-batch-tokens=50", "--fake.step-time=0.01")
    with serve(*flags, "--scheduler.max-sequences=2", "--limits.queued-requests=2") as one:
        yield one
        one.idle()


def whole(server: Server, text: str = PROMPT, tokens: int | None = 8, **fields: Any) -> pb.GenerateResponse:
    answer: pb.GenerateResponse = server.generation.Generate(ask(text, tokens, **fields), timeout=PATIENCE)
    return answer


def streamed(server: Server, text: str = PROMPT, tokens: int = 8, **fields: Any) -> list[pb.GenerateStreamResponse]:
    return list(server.generation.GenerateStream(ask_stream(text, tokens, **fields), timeout=PATIENCE))


def by_index(messages: list[pb.GenerateStreamResponse]) -> dict[int, list[pb.GenerateStreamResponse]]:
    found = defaultdict(list)
    for message in messages:
        found[message.index].append(message)
    return dict(found)


# Log-probabilities of the prompt


def test_each_token_of_the_prompt_but_the_first_has_its_own(narrow: Server) -> None:
    scored = pb.OutputOptions(prompt_logprobs=2)
    answer = whole(narrow, output=scored)
    assert "".join(one.text for one in answer.prompt_logprobs) == PROMPT[1:]
    assert all(len(one.top) == 2 for one in answer.prompt_logprobs)
    assert answer.text == whole(narrow).text
    messages = streamed(narrow, output=scored)
    told = [one for message in messages for one in message.prompt_logprobs]
    assert told == list(answer.prompt_logprobs)
    first = next(place for place, message in enumerate(messages) if message.text)
    assert not any(message.prompt_logprobs for message in messages[first:])
    assert messages[0].HasField("prompt_info")
    assert sum(message.HasField("prompt_info") for message in messages) == 1
    assert whole(narrow, output=pb.OutputOptions(prompt_logprobs=0)).prompt_logprobs[0].top == []


def test_their_messages_are_bounded(server: Server) -> None:
    messages = streamed(server, "x" * 1500, 1, output=pb.OutputOptions(prompt_logprobs=20))
    sizes = [len(message.prompt_logprobs) for message in messages if message.prompt_logprobs]
    assert sum(sizes) == 1499
    assert max(sizes) * 21 <= 4096


def test_no_cache_hides_them(narrow: Server) -> None:
    greedy = pb.SamplingOptions(temperature=0)
    for _ in range(2):
        request = ask(PROMPT, 4, sampling=greedy, output=pb.OutputOptions(prompt_logprobs=0))
        answer, call = narrow.generation.Generate.with_call(request, timeout=PATIENCE)
        assert dict(call.initial_metadata())["x-cache"] == "bypass"
        assert len(answer.prompt_logprobs) == len(PROMPT) - 1
        assert answer.finish.usage.cached_tokens == 0


def test_they_come_without_an_answer_where_no_token_is_asked_for(narrow: Server) -> None:
    answer = whole(narrow, tokens=0, output=pb.OutputOptions(prompt_logprobs=0))
    assert (answer.text, len(answer.prompt_logprobs)) == ("", len(PROMPT) - 1)
    assert (answer.finish.reason, answer.finish.usage.completion_tokens) == (pb.FINISH_REASON_LENGTH, 0)
    assert refused(narrow.generation.Generate, ask(PROMPT, 0)).fields == {"stopping.max_tokens"}
    both = ask(PROMPT, 0, output=pb.OutputOptions(prompt_logprobs=0), n=2)
    assert refused(narrow.generation.Generate, both).fields == {"n"}
    most = ask(PROMPT, output=pb.OutputOptions(prompt_logprobs=21))
    assert refused(narrow.generation.Generate, most).fields == {"output.prompt_logprobs"}


def test_a_token_of_half_a_character_has_its_bytes(server: Server) -> None:
    told = whole(server, "a\u00e9", 1, output=pb.OutputOptions(prompt_logprobs=0)).prompt_logprobs
    assert [(one.text, one.raw) for one in told] == [("\ufffd", b"\xc3"), ("\ufffd", b"\xa9")]
    answer = whole(server, "abc", 5, output=pb.OutputOptions(logprobs=3))
    assert "".join(one.text for one in answer.logprobs) == answer.text
    assert all(len(one.text) == 1 and not one.raw for token in answer.logprobs for one in token.top)


# Several answers


def test_answers_are_those_of_seeds_in_a_row(narrow: Server) -> None:
    alone = [whole(narrow, sampling=pb.SamplingOptions(temperature=1, seed=7 + number)) for number in range(3)]
    answer = whole(narrow, sampling=DRAWN, n=3)
    assert [answer.text, *(one.text for one in answer.more_answers)] == [one.text for one in alone]
    assert [one.index for one in answer.more_answers] == [1, 2]
    assert len({one.text for one in alone}) == 3
    finishes = [answer.finish, *(one.finish for one in answer.more_answers)]
    assert [one.sampling.seed for one in finishes] == [7, 8, 9]
    assert sum(one.usage.prompt_tokens for one in finishes) == len(PROMPT)
    assert [one.usage.completion_tokens for one in finishes] == [8, 8, 8]

    messages = streamed(narrow, sampling=DRAWN, n=3)
    found = by_index(messages)
    assert ["".join(one.text for one in found[number]) for number in range(3)] == [one.text for one in alone]
    for pieces in found.values():
        assert [one.HasField("finish") for one in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [one.HasField("prompt_info") for one in messages] == [True] + [False] * (len(messages) - 1)


def test_greedy_answers_are_the_same_and_generated_once(server: Server) -> None:
    before = server.idle().generated_tokens
    greedy = pb.SamplingOptions(temperature=0)
    answer = whole(server, sampling=greedy, n=3)
    assert server.idle().generated_tokens - before == 8
    assert [one.text for one in answer.more_answers] == [answer.text] * 2
    found = by_index(streamed(server, sampling=greedy, n=3))
    assert ["".join(one.text for one in found[number]) for number in range(3)] == [answer.text] * 3
    assert [found[number][-1].finish.usage.prompt_tokens for number in range(3)] == [len(PROMPT), 0, 0]


def test_the_prompt_is_computed_once(narrow: Server) -> None:
    prompt = "of which nobody has computed anything so far: " * 8
    before = narrow.idle()
    messages = streamed(narrow, prompt, sampling=DRAWN, n=4)
    after = narrow.idle()
    assert after.prompt_tokens - before.prompt_tokens == 4 * len(prompt)
    assert after.cached_tokens - before.cached_tokens == 3 * ((len(prompt) - 1) // 16 * 16)
    assert sum(message.finish.usage.prompt_tokens for message in messages) == len(prompt)


def test_sampled_ones_are_not_kept(narrow: Server) -> None:
    drawn = pb.SamplingOptions(temperature=1, seed=99)
    for _ in range(2):
        _, call = narrow.generation.Generate.with_call(ask(PROMPT, sampling=drawn, n=2), timeout=PATIENCE)
        assert dict(call.initial_metadata())["x-cache"] == "bypass"


def test_scores_of_the_prompt_come_once(narrow: Server) -> None:
    both = pb.OutputOptions(prompt_logprobs=0)
    for sampling in (DRAWN, pb.SamplingOptions(temperature=0)):
        answer = whole(narrow, sampling=sampling, output=both, n=2)
        assert len(answer.prompt_logprobs) == len(PROMPT) - 1
        assert len(answer.more_answers) == 1
        messages = streamed(narrow, sampling=sampling, output=both, n=2)
        assert sum(len(message.prompt_logprobs) for message in messages) == len(PROMPT) - 1
        assert {message.index for message in messages if message.prompt_logprobs} == {0}


def test_all_are_let_in_or_none(narrow: Server) -> None:
    assert refused(narrow.generation.Generate, ask(PROMPT, sampling=DRAWN, n=5)).fields == {"n"}
    for number in (0, 17, -1):
        assert refused(narrow.generation.Generate, ask(PROMPT, n=number)).fields == {"n"}
    endless = pb.StoppingOptions(max_tokens=4000)
    with contextlib.closing(_Held(narrow, ask_stream("go on", stopping=endless, sampling=DRAWN, n=2))):
        refusal = refused(narrow.generation.Generate, ask(PROMPT, sampling=DRAWN, n=3))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        narrow.until(lambda load: (load.running, load.waiting, load.live_requests) == (2, 0, 1))
    narrow.idle()
    assert len(whole(narrow, sampling=DRAWN, n=4).more_answers) == 3  # nothing of the refused one holds a slot


@pytest.mark.parametrize("how", ["cancel", "abort"])
def test_they_end_together(narrow: Server, how: str) -> None:
    endless = pb.StoppingOptions(max_tokens=4000)
    held = _Held(narrow, ask_stream("go on", stopping=endless, sampling=DRAWN, n=2, request_id="both"))
    if how == "cancel":
        held.close()
    else:
        narrow.admin.AbortGeneration(admin_pb2.AbortGenerationRequest(request_id="both"), timeout=PATIENCE)
        with pytest.raises(grpc.RpcError) as ended:
            list(held.call)
        assert ended.value.code() is grpc.StatusCode.ABORTED
    narrow.idle()
    assert narrow.load().live_requests == 0


def test_how_many_there_may_be_is_told(server: Server) -> None:
    assert server.models.GetModel(model_pb2.GetModelRequest(), timeout=PATIENCE).model.limits.max_answers == 16


class _Held:
    """A stream whose answers have begun."""

    def __init__(self, server: Server, request: pb.GenerateStreamRequest) -> None:
        self.call = server.generation.GenerateStream(request, timeout=PATIENCE)
        seen: set[int] = set()
        while len(seen) < request.n:
            seen.add(next(self.call).index)

    def close(self) -> None:
        self.call.cancel()
