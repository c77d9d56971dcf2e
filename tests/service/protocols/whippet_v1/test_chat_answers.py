"""Reasoning and calls apart from text, from the engine's ids to the contract: streamed, whole, and stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from cache.api import CacheOptions, Mode, SemanticOptions
from engine.api import Finish, FinishReason, Start, TokenEvents
from service.config.settings import ChatSettings, LimitOptions, OptimizationOptions
from service.core.admission.admission import Admission
from service.core.answers.caches import AnswerCaches
from service.core.answers.lookup import AnswerSources
from service.core.generation import Generator
from service.core.model import ServedModel
from service.core.parsing.formats import HERMES, LLAMA, MISTRAL, choose
from service.core.request import ModelFacts, Origin, Prompt
from service.core.switches import OptimizationSwitches
from service.core.text import Tokenizer
from service.core.text.chat import ChatTemplate
from service.core.text.pieces import byte_letters
from service.core.text.sandbox.processes import TextProcesses
from service.core.tokenization import Tokenization
from service.pb.whippet.v1 import generation_pb2 as pb
from service.protocols.whippet_v1.servicer import GenerationServicer
from service.transport.call.context import Context
from service.transport.call.rpc import Call
from service.transport.call.writer import StallWatch
from tests.service.protocols.whippet_v1.test_messages import Recorder
from tests.service.scripted import Script, ScriptedEngine

FIRST = Start(cached_tokens=0, queue=0.0, prefill=0.0)
LAST = Finish(reason=FinishReason.STOP, stop_token_id=None, cached_tokens=0, queue=0.0, prefill=0.0, decode=0.0)
CALLS = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>'
HERMES_SAID = "<think>\nhm 🙂\n</think>\n\nSure.\n" + CALLS
MISTRAL_SAID = 'ok[TOOL_CALLS]f[ARGS]{"a": "é"}[TOOL_CALLS]g[ARGS]{}'


def tokenizer(template: str = "", special: Sequence[str] = (), added: Sequence[str] = ()) -> Tokenizer:
    """One id a byte, and one for each of these."""
    backend = Backend(models.BPE(vocab=byte_letters(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return Tokenizer(backend, {"default": ChatTemplate(template, {})}, "")


QWEN = tokenizer("<tool_call> {{ messages }}", added=["<think>", "</think>"])
NEMO = tokenizer(special=["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "</s>"])


class Model(ServedModel):
    """With a prompt that is given."""

    prompt = (1,)

    async def encode(self, prompt: Prompt, facts: ModelFacts, origin: Origin) -> tuple[int, ...]:
        return self.prompt


class Front:
    def __init__(self, of: Tokenizer, said: str, size: int = 1, prompt: str = "x", cached: bool = False) -> None:
        engine = ScriptedEngine(script(of.encode(said), size))
        self.model = Model("m", of, engine, TextProcesses(None), choose(ChatSettings(), of))
        self.model.prompt = tuple(of.encode(prompt))
        self.caches = AnswerCaches(CacheOptions(semantic=SemanticOptions(mode=Mode.OFF)), engine, "")
        switches = OptimizationSwitches(OptimizationOptions(response_cache=cached, semantic_cache=False), engine)
        admission = Admission(LimitOptions(), lambda: 8)
        sources = AnswerSources(self.model, engine, self.caches, switches, admission.slots)
        tokenization = Tokenization(self.model, admission)
        self.servicer = GenerationServicer(Generator(self.model, sources, admission), tokenization, self.model, WATCH)

    async def stream(self, **fields: Any) -> Recorder:
        recorder = Recorder()
        call = Call(cast(Context, recorder), Origin("t", 0.0, None), AsyncMock())
        await self.servicer.generate_stream(self.servicer.read(pb.GenerateStreamRequest(**asked(fields))), call)
        return recorder

    async def whole(self, **fields: Any) -> pb.GenerateResponse:
        call = Call(cast(Context, Recorder()), Origin("t", 0.0, None), AsyncMock())
        return await self.servicer.generate(self.servicer.read(pb.GenerateRequest(**asked(fields))), call)


WATCH = StallWatch(60)


def asked(fields: dict[str, Any]) -> dict[str, Any]:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")], tools_json='[{"name": "f"}]')
    return {"chat": chat, "sampling": pb.SamplingOptions(temperature=0), **fields}


def script(ids: list[int], size: int) -> Script:
    pieces = [tuple(ids[at : at + size]) for at in range(0, len(ids), size)] or [()]
    events = [TokenEvents(piece, start=None if number else FIRST) for number, piece in enumerate(pieces[:-1])]
    last = TokenEvents(pieces[-1], start=None if events else FIRST, finish=LAST)
    return [(0.0, event) for event in (*events, last)]


def together(recorder: Recorder) -> tuple[str, str, list[tuple[str, str]]]:
    """Text, reasoning, and names and arguments of calls."""
    messages = recorder.messages
    calls: list[list[str]] = []
    for delta in (delta for message in messages for delta in message.tool_calls):
        if delta.index == len(calls):
            assert len(delta.id) == 9
            calls.append([delta.name, delta.arguments])
        else:
            assert not delta.id + delta.name
            calls[delta.index][1] += delta.arguments
    text, reasoning = ("".join(getattr(one, name) for one in messages) for name in ("text", "reasoning"))
    return text, reasoning, [(name, arguments) for name, arguments in calls]


EXPECTED = ("Sure.\n", "hm 🙂", [("f", '{"a": "é"}'), ("g", "{}")])


def taken(answer: pb.GenerateResponse) -> tuple[str, str, list[tuple[str, str]]]:
    return answer.text, answer.reasoning, [(call.name, call.arguments) for call in answer.tool_calls]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_streamed_and_whole(size: int) -> None:
    recorder = await Front(QWEN, HERMES_SAID, size).stream()
    messages = recorder.messages
    assert together(recorder) == EXPECTED
    assert [message.HasField("prompt_info") for message in messages] == [True] + [False] * (len(messages) - 1)
    assert [message.HasField("finish") for message in messages] == [False] * (len(messages) - 1) + [True]
    assert all(m.text or m.reasoning or m.tool_calls or m.HasField("finish") for m in messages)
    assert messages[-1].finish.reason == pb.FINISH_REASON_STOP
    assert taken(await Front(QWEN, HERMES_SAID, size).whole()) == EXPECTED


async def test_ids_are_sent_with_what_is_held_back() -> None:
    recorder = await Front(QWEN, HERMES_SAID).stream(output=pb.OutputOptions(token_ids=True))
    assert [token for message in recorder.messages for token in message.token_ids] == QWEN.encode(HERMES_SAID)
    assert together(recorder) == EXPECTED


async def test_what_is_not_asked_for_stays_text() -> None:
    simple = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
    for fields, expected in (
        ({"output": pb.OutputOptions(parse=False)}, (HERMES_SAID, "", [])),
        ({"chat": simple}, ("Sure.\n" + CALLS, "hm 🙂", [])),
        ({"chat": None, "text": "x"}, (HERMES_SAID, "", [])),
        ({"output": pb.OutputOptions(text=False)}, ("", "", [])),
    ):
        assert together(await Front(QWEN, HERMES_SAID).stream(**fields)) == expected
        assert taken(await Front(QWEN, HERMES_SAID).whole(**fields)) == expected


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [("x<think>\n", True), ("x<think>", True), ("<think>\n\n</think>\n\n", False), ("<think> x\n", False)],
)
async def test_a_template_may_begin_the_reasoning(prompt: str, inside: bool) -> None:
    found = together(await Front(QWEN, "hm\n</think>\n\nYes", prompt=prompt).stream())
    assert found == (("Yes", "hm", []) if inside else ("hm\n</think>\n\nYes", "", []))


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("limit", [1, 5])
async def test_markers_that_are_tokens_are_found_in_stored_answers_too(size: int, limit: int) -> None:
    """They have no text: their place is told by the ids."""
    expected = ("ok", "", [("f", '{"a": "é"}'), ("g", "{}")])
    front = Front(NEMO, MISTRAL_SAID, size, cached=True)
    delivery = pb.DeliveryOptions(max_tokens_per_message=limit)
    assert together(await front.stream(delivery=delivery)) == expected
    for _ in range(6000):
        recorder = await front.stream(delivery=delivery)
        if ("x-cache", "hit-response") in recorder.metadata:
            break
        await asyncio.sleep(0.01)
    else:
        raise AssertionError("never stored")
    assert together(recorder) == expected
    assert taken(await front.whole()) == expected
    plain = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
    assert together(await front.stream(chat=plain)) == ('okf{"a": "é"}g{}', "", [])
    await front.caches.aclose()


@pytest.mark.parametrize(
    ("of", "calls", "reasoning"),
    [
        (QWEN, HERMES, "<think>"),
        (tokenizer("<tool_call><function=x>"), None, None),
        (tokenizer(special=["[TOOL_CALLS]", "[THINK]", "[/THINK]"]), MISTRAL, "[THINK]"),
        (tokenizer("[TOOL_CALLS]"), MISTRAL, None),
        (tokenizer(special=["<|python_tag|>"]), LLAMA, None),
        (tokenizer("{{ messages }}", added=["<think>"]), None, None),
    ],
)
def test_formats_by_template_and_tokens(of: Tokenizer, calls: Any, reasoning: str | None) -> None:
    found = choose(ChatSettings(), of)
    assert (found.calls and found.calls.name) == (calls and calls.name)
    assert (found.reasoning and found.reasoning.begin) == reasoning
    assert choose(ChatSettings(tool_format="none", reasoning_format="none"), of).parser(True, False, "") is None
    forced = choose(ChatSettings(tool_format="hermes", reasoning_format="think"), of)
    assert (forced.calls, forced.reasoning and forced.reasoning.begin) == (HERMES, "<think>")


def test_plain_answers_are_not_touched() -> None:
    assert choose(ChatSettings(), tokenizer("{{ messages }}")).parser(True, False, "") is None
    assert choose(ChatSettings(), NEMO).parser(False, False, "") is None
