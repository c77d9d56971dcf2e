"""How an answer is cut into messages, by a context that only records, and with an engine that only says what it is
told to.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.api import CacheOptions, Mode, SemanticOptions
from engine.api import (
    Finish,
    FinishReason,
    Start,
    TokenEvents,
    TokenLogprob,
)
from engine.errors import EngineFailed
from service.config.settings import LimitOptions, OptimizationOptions
from service.core.admission.admission import Admission
from service.core.answers.caches import AnswerCaches
from service.core.answers.lookup import AnswerSources
from service.core.errors import StreamStalled
from service.core.generation import Generator
from service.core.model import ServedModel
from service.core.request import Origin
from service.core.switches import OptimizationSwitches
from service.core.text import Tokenizer
from service.core.text.sandbox.processes import TextProcesses
from service.core.tokenization import Tokenization
from service.observability.record import RecordBuilder
from service.pb.whippet.v1 import generation_pb2 as pb
from service.protocols.whippet_v1.servicer import GenerationServicer
from service.transport.call.context import Context
from service.transport.call.rpc import Call
from service.transport.call.writer import StallWatch, Writer
from tests.properties import example_count
from tests.service.scripted import Script, ScriptedEngine

pytestmark = pytest.mark.virtual_time

START = Start(cached_tokens=3, queue=0.1, prefill=0.2)
FINISH = Finish(reason=FinishReason.LENGTH, stop_token_id=None, cached_tokens=3, queue=0.1, prefill=0.2, decode=0.3)


class Recorder:
    """A context. Writes take `slow` seconds each, and two at once are an error, as they are to gRPC."""

    def __init__(self, slow: float = 0.0) -> None:
        self.messages: list[pb.GenerateStreamResponse] = []
        self.at: list[float] = []
        self.metadata: tuple[tuple[str, str], ...] = ()
        self._slow = slow
        self._writing = False

    async def send_initial_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        assert not self.messages
        self.metadata = metadata

    async def write(self, data: bytes) -> None:
        assert not self._writing, "two writes at once"
        self._writing = True
        try:
            await asyncio.sleep(self._slow)
        finally:
            self._writing = False
        self.messages.append(pb.GenerateStreamResponse.FromString(data))
        self.at.append(asyncio.get_running_loop().time())


def model_of(engine: ScriptedEngine) -> ServedModel:
    return ServedModel("m", Tokenizer.of_bytes(), engine, TextProcesses(None))


def generator_of(engine: ScriptedEngine, admission: Admission) -> Generator:
    """Without caches."""
    model = model_of(engine)
    caches = AnswerCaches(CacheOptions(semantic=SemanticOptions(mode=Mode.OFF)), engine, "")
    switches = OptimizationSwitches(OptimizationOptions(response_cache=False, semantic_cache=False), engine)
    return Generator(model, AnswerSources(model, engine, caches, switches, admission.slots), admission)


async def stream(
    generator: Generator, request: pb.GenerateStreamRequest, recorder: Recorder, watch: StallWatch
) -> None:
    model = model_of(ScriptedEngine([]))
    tokenization = Tokenization(model, Admission(LimitOptions(), lambda: 8))
    servicer = GenerationServicer(generator, tokenization, model, watch)
    call = Call(cast(Context, recorder), Origin("t", 0.0, None), AsyncMock())
    await servicer.generate_stream(servicer.read(request), call)


async def answer(script: Script, slow: float = 0.0, **fields: Any) -> tuple[Recorder, ScriptedEngine]:
    """Runs one streamed request."""
    recorder, engine = Recorder(slow), ScriptedEngine(script)
    admission = Admission(LimitOptions(), lambda: 8)
    generator = generator_of(engine, admission)
    try:
        await stream(generator, pb.GenerateStreamRequest(text="x", **fields), recorder, StallWatch(30))
    finally:
        assert engine.stream.cancelled
        assert admission.live == 0
    return recorder, engine


def script(data: bytes, sizes: Sequence[int], pauses: Sequence[float] = (0.0,)) -> Script:
    """`data` as tokens, so many an event."""
    events: list[tuple[float, TokenEvents | Exception]] = []
    at = 0
    for number, size in enumerate(sizes):
        ids = tuple(data[at : at + size])
        at += size
        events.append((pauses[number % len(pauses)], TokenEvents(ids, start=START if number == 0 else None)))
    events.append((0.0, TokenEvents(tuple(data[at:]), finish=FINISH, start=None if sizes else START)))
    return events


@pytest.mark.product
@settings(max_examples=example_count(150), deadline=None)
@given(
    st.text(max_size=40),
    st.lists(st.integers(1, 7), max_size=12),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.001]),
    st.booleans(),
    st.sampled_from([0.0, 0.0007]),
)
def test_messages_hold_whole_characters_and_no_more_tokens_than_asked(
    text: str, sizes: list[int], limit: int, delay: float, stops: bool, slow: float
) -> None:
    stopping = pb.StoppingOptions(stop_strings=["\x00\x00never"] if stops else [])
    delivery = pb.DeliveryOptions(max_tokens_per_message=limit)
    delivery.max_delay.FromNanoseconds(int(delay * 1e9))
    output = pb.OutputOptions(token_ids=True)
    data = text.encode()
    run = answer(script(data, sizes, (0.0, 0.0005)), slow, stopping=stopping, delivery=delivery, output=output)
    recorder, _ = asyncio.run(run)
    messages = recorder.messages
    assert "".join(message.text for message in messages) == text
    assert bytes(token_id for message in messages for token_id in message.token_ids) == data
    assert all(len(message.token_ids) <= limit for message in messages)
    assert [message.HasField("prompt_info") for message in messages].count(True) == 1
    assert messages[0].HasField("prompt_info")
    assert messages[-1].HasField("finish")
    assert all(message.text or message.token_ids or message.HasField("finish") for message in messages)
    usage = messages[-1].finish.usage
    assert (usage.completion_tokens, usage.cached_tokens, usage.prompt_tokens) == (len(data), 3, 1)


async def test_half_a_character_is_never_sent() -> None:
    data = "a🙂b".encode()
    recorder, _ = await answer(script(data, [1] * (len(data) - 1)))
    assert [message.text for message in recorder.messages] == ["a", "🙂", "b"]


async def test_a_broken_character_at_the_end_is_replaced() -> None:
    recorder, _ = await answer(script(b"a\xf0\x9f", [1, 1]))
    assert "".join(message.text for message in recorder.messages) == "a\ufffd"


async def test_what_may_become_a_stop_string_waits_and_then_goes_on() -> None:
    stopping = pb.StoppingOptions(stop_strings=["END"])
    recorder, engine = await answer(script(b"xENxENDyy", [1] * 8), stopping=stopping)
    texts = [message.text for message in recorder.messages]
    assert "".join(texts) == "xENx"
    assert texts[0] == "x"
    finish = recorder.messages[-1].finish
    assert (finish.reason, finish.stop_string) == (pb.FINISH_REASON_STOP_STRING, "END")
    assert (finish.usage.completion_tokens, finish.usage.cached_tokens) == (7, 3)
    assert finish.timings.queue.ToMilliseconds() == 100
    assert finish.timings.prefill.ToMilliseconds() == 200
    assert engine.stream.cancelled


@pytest.mark.parametrize("size", [1, 3, 9])
async def test_ids_and_logprobs_end_with_the_stop(size: int) -> None:
    data = b"abENDyyyy"
    events: Script = [
        (0.0, TokenEvents(tuple(data[n : n + size]), tuple(TokenLogprob(-b, ()) for b in data[n : n + size])))
        for n in range(0, len(data), size)
    ]
    recorder, _ = await answer(
        events,
        stopping=pb.StoppingOptions(stop_strings=["END"]),
        output=pb.OutputOptions(token_ids=True, logprobs=0),
    )
    ids = [token_id for message in recorder.messages for token_id in message.token_ids]
    assert bytes(ids) == b"abEND"
    places = [place for message in recorder.messages for place in message.logprobs]
    assert [(place.token_id, place.logprob) for place in places] == [(token_id, -token_id) for token_id in ids]


@pytest.mark.product
async def test_a_message_is_sent_when_its_first_token_is_old_enough() -> None:
    """Stop strings make the front gather by itself: four tokens at once, then a silence longer than the delay."""
    delivery = pb.DeliveryOptions(max_tokens_per_message=100)
    delivery.max_delay.FromMilliseconds(200)
    started = asyncio.get_running_loop().time()
    recorder, _ = await answer(
        script(b"12345", [1] * 5, (0.0, 0.01, 0.01, 0.01, 1.5)),
        stopping=pb.StoppingOptions(stop_strings=["never"]),
        delivery=delivery,
    )
    assert [message.text for message in recorder.messages] == ["1234", "5"]
    assert 0.19 < recorder.at[0] - started < 1.2


async def test_a_slow_write_delays_the_next_message_but_loses_none() -> None:
    delivery = pb.DeliveryOptions(max_tokens_per_message=100)
    delivery.max_delay.FromMilliseconds(5)
    recorder, _ = await answer(
        script(b"x" * 40, [1] * 39, (0.004,)),
        slow=0.03,
        stopping=pb.StoppingOptions(stop_strings=["never"]),
        delivery=delivery,
    )
    assert sum(len(message.text) for message in recorder.messages) == 40
    assert 3 <= len(recorder.messages) <= 30


async def test_a_message_that_is_full_waits_for_one_that_is_late() -> None:
    delivery = pb.DeliveryOptions(max_tokens_per_message=2)
    delivery.max_delay.FromMilliseconds(5)
    recorder, _ = await answer(
        script(b"abcdef", [1] * 5, (0.0, 0.05, 0.0)),  # the second comes while the first is written
        slow=0.2,
        stopping=pb.StoppingOptions(stop_strings=["never"]),
        delivery=delivery,
    )
    assert "".join(message.text for message in recorder.messages) == "abcdef"
    assert recorder.messages[0].text == "a"
    assert all(len(message.text) <= 2 for message in recorder.messages)


async def test_a_full_message_waits_for_no_token() -> None:
    delivery = pb.DeliveryOptions(max_tokens_per_message=3)
    delivery.max_delay.FromSeconds(30)
    pauses = [*script(b"abcd", [1, 1, 1])[:-1], (0.5, TokenEvents(tuple(b"d"), finish=FINISH))]
    recorder, _ = await answer(pauses, stopping=pb.StoppingOptions(stop_strings=["never"]), delivery=delivery)
    assert [message.text for message in recorder.messages] == ["abc", "d"]
    assert recorder.at[1] - recorder.at[0] > 0.4


async def test_a_failure_in_the_middle_comes_after_what_was_said() -> None:
    recorder, engine = Recorder(), ScriptedEngine([(0.0, TokenEvents((65,))), (0.0, EngineFailed("x"))])
    generator = generator_of(engine, Admission(LimitOptions(), lambda: 8))
    with pytest.raises(EngineFailed):
        await stream(generator, pb.GenerateStreamRequest(text="x"), recorder, StallWatch(30))
    assert [message.text for message in recorder.messages] == ["A"]
    assert engine.stream.cancelled


async def test_cancellation_in_a_late_write_leaves_no_task_behind() -> None:
    delivery = pb.DeliveryOptions(max_tokens_per_message=100)
    delivery.max_delay.FromMilliseconds(1)
    run = asyncio.create_task(
        answer(
            [(0.0, TokenEvents((65,))), (60.0, TokenEvents((66,)))],
            slow=60.0,
            stopping=pb.StoppingOptions(stop_strings=["never"]),
            delivery=delivery,
        )
    )
    await asyncio.sleep(0.05)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_caller_who_leaves_as_the_engine_fails_leaves_nothing_to_log() -> None:
    """asyncio says, with its message, what failed and was awaited by nobody."""
    loop, said, engine = asyncio.get_running_loop(), list[object](), ScriptedEngine([])
    loop.set_exception_handler(lambda _, told: said.append(told))

    async def failing() -> AsyncIterator[TokenEvents]:
        yield TokenEvents((65,))
        loop.call_soon(lambda: run.cancel())  # before the call hears of the failure
        raise EngineFailed("x")

    engine.stream._events = failing()
    admission = Admission(LimitOptions(), lambda: 8)
    request = pb.GenerateStreamRequest(text="x")
    run = asyncio.create_task(stream(generator_of(engine, admission), request, Recorder(), StallWatch(30)))
    with pytest.raises(asyncio.CancelledError):
        await run
    await asyncio.sleep(0)
    gc.collect()
    assert not said
    assert engine.stream.cancelled
    assert admission.live == 0


@pytest.mark.parametrize("stops", [[], ["never"]])
async def test_a_stalled_write_ends_the_stream_and_nothing_else(stops: list[str]) -> None:
    recorder, engine = Recorder(slow=60.0), ScriptedEngine([(0.0, TokenEvents((65,))), (60.0, TokenEvents((66,)))])
    admission = Admission(LimitOptions(), lambda: 8)
    generator = generator_of(engine, admission)
    watch = StallWatch(0.1)
    watching = asyncio.create_task(watch.run())
    request = pb.GenerateStreamRequest(text="x", stopping=pb.StoppingOptions(stop_strings=stops))
    request.delivery.max_tokens_per_message = 100
    request.delivery.max_delay.FromMilliseconds(1)

    async def handle() -> str:
        try:
            await stream(generator, request, recorder, watch)
        except StreamStalled:
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0, "what is done about it would be cancelled as well"
            return "stalled"
        return "done"

    async with asyncio.timeout(60):
        assert await asyncio.create_task(handle()) == "stalled"
    assert engine.stream.cancelled
    assert admission.live == 0
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching


async def test_an_engine_that_says_nothing_for_long_is_no_stall() -> None:
    watch = StallWatch(0.1)
    watching = asyncio.create_task(watch.run())
    with Writer(cast(Context, Recorder()), watch, RecordBuilder()) as writer:
        await writer.write(b"")
        await asyncio.sleep(0.5)
        await writer.write(b"")
    assert not writer.stalled
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching


async def test_a_request_reaches_the_engine_as_it_was_asked() -> None:
    _, engine = await answer(
        [(0.0, TokenEvents((65,), finish=FINISH))],
        request_id="mine",
        stopping=pb.StoppingOptions(max_tokens=7, min_tokens=2, stop_token_ids=[9]),
        sampling=pb.SamplingOptions(temperature=0.5, seed=-1, logit_bias={3: 1.5, 1: -1.0}),
        output=pb.OutputOptions(logprobs=4),
        priority=pb.PRIORITY_INTERACTIVE,
    )
    (request,) = engine.requests
    assert request.request_id == "t/mine"
    assert request.token_ids == (ord("x"),)
    assert (request.stopping.max_tokens, request.stopping.min_tokens) == (7, 2)
    assert request.stopping.stop_token_ids == (9,)
    assert (request.sampling.temperature, request.sampling.seed) == (0.5, 2**64 - 1)
    assert request.sampling.logit_bias == ((1, -1.0), (3, 1.5))
    assert (request.logprobs, request.priority.name) == (4, "INTERACTIVE")
    assert request.deadline is None
