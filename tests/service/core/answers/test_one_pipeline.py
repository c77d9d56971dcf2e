"""One answer, however it is read: alone, as leader, by a follower who joins late, or out of the cache. Each gets the
messages that a plain specification says: which text belongs to which id is worked out here from all ids at once.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from cache.api import CacheOptions, Mode, SemanticOptions
from engine.api import GREEDY, Finish, FinishReason, Priority, Start, TokenEvents
from service.config.settings import LimitOptions, OptimizationOptions
from service.core.admission.admission import Admission, Ticket
from service.core.answers.caches import AnswerCaches
from service.core.answers.delivery import MANY, AnswerMessage
from service.core.answers.lookup import AnswerSources
from service.core.generation import Generator
from service.core.model import ServedModel
from service.core.request import CacheSource, CacheUse, Delivery, Ending, Origin, Output, PromptFacts, Request, Stops
from service.core.request import TokenPrompt as Prompt
from service.core.switches import OptimizationSwitches
from service.core.text import Tokenizer
from service.core.text.sandbox.processes import TextProcesses
from tests.properties import example_count
from tests.service.scripted import Script, ScriptedEngine

START = Start(cached_tokens=1, queue=0.5, prefill=0.25)
FOREVER = 30.0  # seconds; no timer fires in a test


@dataclass(frozen=True)
class Case:
    """What the engine says, in which events, and what is asked for."""

    ids: bytes
    sizes: tuple[int, ...]  # ids an event; the last event has what is left
    stop_token: bool  # whether the last id is one
    strings: tuple[str, ...]
    include: bool
    least: int
    delivery: Delivery
    text: bool
    token_ids: bool

    @property
    def request(self) -> Request:
        return Request(
            request_id="r",
            prompt=Prompt((1, 2, 3)),
            sampling=GREEDY,
            stops=Stops(
                max_tokens=max(1, len(self.ids)),
                min_tokens=self.least,
                strings=self.strings,
                token_ids=(),
                include=self.include,
            ),
            output=Output(self.text, self.token_ids, None),
            priority=Priority.NORMAL,
            time_budget=None,
            delivery=self.delivery,
            cache=CacheUse(),
            seeded=False,
        )

    @property
    def events(self) -> list[bytes]:
        """A stop token comes in an event of its own or with others, but always in the last."""
        found, at = [], 0
        for size in self.sizes:
            if at + size < len(self.ids):
                found.append(self.ids[at : at + size])
                at += size
        return [*found, self.ids[at:]]

    @property
    def script(self) -> Script:
        *first, last = self.events
        stop = self.ids[-1] if self.stop_token else None
        reason = FinishReason.LENGTH if stop is None else FinishReason.STOP
        finish = Finish(reason=reason, stop_token_id=stop, cached_tokens=1, queue=0.5, prefill=0.25, decode=2.0)
        events = [TokenEvents(tuple(data), start=None if n else START) for n, data in enumerate(first)]
        events.append(TokenEvents(tuple(last), finish=finish, start=None if first else START))
        return [(0.0, event) for event in events]


BYTES = st.lists(st.sampled_from([*b"ab \n", *"é🙂".encode(), 0xFF]), min_size=1, max_size=24).map(bytes)
CASES = st.builds(
    Case,
    ids=BYTES,
    sizes=st.lists(st.integers(1, 6), max_size=10).map(tuple),
    stop_token=st.booleans(),
    strings=st.lists(st.text("ab é\n", min_size=1, max_size=3), max_size=2).map(tuple),
    include=st.booleans(),
    least=st.integers(0, 6),
    delivery=st.builds(Delivery, st.integers(1, 7), st.sampled_from([0.0, FOREVER])),
    text=st.booleans(),
    token_ids=st.booleans(),
).map(lambda case: replace(case, least=min(case.least, len(case.ids))))


def specified(case: Case, fill: bool) -> list[tuple[str, bytes]]:
    """Text and ids of each message. `fill`: a message waits for ids beyond an event until it is full."""
    texts, stopped = released(case)
    ids = case.ids[: len(texts)] if stopped else case.ids
    texts += [""] * (len(ids) - len(texts))
    messages: list[tuple[str, bytes]] = []
    text, held, at = "", b"", 0

    def flush() -> None:
        nonlocal text, held
        if (text and case.text) or (held and case.token_ids):
            messages.append((text if case.text else "", held if case.token_ids else b""))
            text, held = "", b""
        elif not case.token_ids or not held:
            text, held = "", b""

    ends, end = [], 0
    for event in case.events:
        end += len(event)
        ends.append(min(end, len(ids)))
    for end in ends:
        while at < end:
            if len(held) == case.delivery.max_tokens:
                flush()
            held, text = held + ids[at : at + 1], text + texts[at]
            at += 1
        if at < len(ids) and (not fill or len(held) == case.delivery.max_tokens):
            flush()
    return [*messages, (text if case.text else "", held if case.token_ids else b"")]


def released(case: Case) -> tuple[list[str], str | None]:
    """The text that each id settles, up to a stop string if one matches; what is held back at the end is the last's."""
    silent = case.stop_token and not case.include
    ids = case.ids[:-1] if silent else case.ids
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    whole = [decoder.decode(ids[n : n + 1]) for n in range(len(ids))]
    tail = decoder.decode(b"", final=True)
    text, owners = "", []
    for number, piece in enumerate([*whole, tail]):
        text += piece
        owners += [min(number, len(ids))] * len(piece)
    for end in range(1, len(text) + 1):
        number = owners[end - 1]  # the id that settled the last character, or len(ids) for what was left over
        matched = [s for s in case.strings if text.endswith(s, 0, end) and min(number + 1, len(ids)) >= case.least]
        if matched:
            stop = max(matched, key=len)
            cut = end if case.include else end - len(stop)
            return share(case, text[:cut], owners, min(number + 1, len(ids)), text), stop
    if silent and len(case.events[-1]) == 1:  # the ids before it are out when the end comes
        return share(case, text, owners, len(case.ids), text), None
    return share(case, text, owners, len(ids), text), None


def share(case: Case, sent: str, owners: list[int], count: int, text: str) -> list[str]:
    """Each id's share. What may become a stop string waits for the id after which it cannot, or for the last one."""
    found, at = [], 0
    for number in range(count):
        upto = len([owner for owner in owners if owner <= number])
        if number < count - 1:
            prefixes = {stop[:n] for stop in case.strings for n in range(1, len(stop))}
            held = next((n for n in range(upto) if text[n:upto] in prefixes), upto)
            upto = min(held, len(sent))
        else:
            upto = len(sent)
        found.append(sent[at:upto])
        at = max(at, upto)
    return found


class Recorder:
    """An outlet."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, bytes]] = []
        self.prompt: PromptFacts | None = None
        self.ending: Ending | None = None
        self.crowd: list[Ticket] = []  # who go when the answer begins

    async def begin(self, prompt: PromptFacts) -> None:
        self.prompt = prompt
        for ticket in self.crowd:
            ticket.__exit__(None, None, None)

    async def send(self, message: AnswerMessage) -> None:
        await asyncio.sleep(0)
        assert self.ending is None
        self.messages.append((message.text, bytes(message.token_ids)))
        self.ending = message.ending


class Front:
    """The use case over a scripted engine."""

    def __init__(self, case: Case, cached: bool) -> None:
        self.engine = ScriptedEngine(case.script)
        self.model = ServedModel("m", Tokenizer.of_bytes(), self.engine, TextProcesses(None))
        self.caches = AnswerCaches(CacheOptions(semantic=SemanticOptions(mode=Mode.OFF)), self.engine, "")
        switches = OptimizationSwitches(OptimizationOptions(response_cache=cached, semantic_cache=False), self.engine)
        self.admission = Admission(LimitOptions(), lambda: 8)
        sources = AnswerSources(self.model, self.engine, self.caches, switches, self.admission.slots)
        self.generator = Generator(self.model, sources, self.admission)

    async def read(self, request: Request, name: str, whole: bool = False) -> Recorder:
        recorder, named = Recorder(), structs.replace(request, request_id=name)
        run = self.generator.answer if whole else self.generator.stream
        await run(named, Origin("t", 0.0, None), recorder)
        return recorder


async def stored(front: Front, request: Request) -> Recorder:
    """The answer out of the cache: it is stored beside the request."""
    for _ in range(1000):
        recorder = await front.read(request, "hit")
        assert recorder.prompt is not None
        if recorder.prompt.cache == "hit-response":
            return recorder
        await asyncio.sleep(0.001)
    raise AssertionError("never stored")


def told(recorder: Recorder) -> tuple[object, ...]:
    ending = recorder.ending
    assert ending is not None
    return ending.reason, ending.stop_string, ending.stop_token_id, ending.completion_tokens, ending.prompt_tokens


@pytest.mark.product
@settings(max_examples=example_count(250), deadline=None)
@given(CASES, st.integers(0, 12))
def test_every_reader_gets_the_messages_of_the_specification(case: Case, late: int) -> None:
    async def run() -> None:
        alone = await Front(case, cached=False).read(case.request, "alone")
        filled = specified(case, fill=case.delivery.max_delay > 0)
        assert alone.messages == (filled if case.strings else specified(case, fill=False))

        front = Front(case, cached=True)
        leader = asyncio.ensure_future(front.read(case.request, "leader"))
        for _ in range(late):
            await asyncio.sleep(0)
        follower = asyncio.ensure_future(front.read(case.request, "follower"))
        readers = [await leader, await follower, await stored(front, case.request)]
        assert len(front.engine.requests) == 1
        for reader in readers:
            assert reader.messages == filled
            assert told(reader) == told(alone)
        endings = [reader.ending for reader in readers if reader.ending is not None]
        assert [ending.outcome.source for ending in endings][::2] == [CacheSource.NONE, CacheSource.RESPONSE]
        whole = await front.read(case.request, "whole", whole=True)
        assert whole.messages == [
            ("".join(text for text, _ in filled), b"".join(ids for _, ids in filled)),
        ]
        assert told(whole) == told(alone)
        await front.caches.aclose()

    asyncio.run(run())


PLAIN = Case(b"abcdef", (1, 1, 1), False, (), False, 0, Delivery(1, 0.0), True, True)


async def test_a_follower_accounts_for_its_own_time_and_for_no_work_of_the_engines() -> None:
    front = Front(PLAIN, cached=True)
    leader = asyncio.ensure_future(front.read(PLAIN.request, "leader"))
    await asyncio.sleep(0)
    follower = asyncio.ensure_future(front.read(PLAIN.request, "follower"))
    mine, theirs = (await leader).ending, (await follower).ending
    assert mine is not None
    assert theirs is not None
    assert (mine.outcome.source, mine.cached_tokens, mine.prefill, mine.decode) == (CacheSource.NONE, 1, 0.25, 2.0)
    assert (theirs.outcome.source, theirs.cached_tokens, theirs.prefill) == (CacheSource.RESPONSE, 3, 0.0)
    assert theirs.reason is FinishReason.LENGTH
    assert 0.0 <= theirs.decode < 2.0
    await front.caches.aclose()


@pytest.mark.parametrize(
    ("asked", "given"),
    [((1000, 5.0), (16, 0.02)), ((16, 0.02), (16, 0.02)), ((1, 0.0), (1, 0.0)), ((4, 1.0), (4, 0.02))],
)
async def test_parts_that_others_read_are_never_coarser_than_all_can_take(
    asked: tuple[int, float], given: tuple[int, float]
) -> None:
    case = replace(PLAIN, delivery=Delivery(*asked))
    shared, alone = Front(case, cached=True), Front(case, cached=False)
    for front in (shared, alone):
        await front.read(case.request, "r")
        await front.caches.aclose()
    assert shared.engine.stream.batched == [given]
    assert alone.engine.stream.batched == [asked]


def numbers(recorder: Recorder) -> Sequence[int]:
    return [len(ids) for _, ids in recorder.messages]


async def test_a_stored_answer_is_cut_for_a_reader_of_smaller_messages() -> None:
    """The one who asked first took whole events; characters of several ids stay whole."""
    case = Case("a🙂b".encode(), (6,), False, (), False, 0, Delivery(9, FOREVER), True, True)
    front = Front(case, cached=True)
    assert numbers(await front.read(case.request, "first")) == [6]
    fine = structs.replace(case.request, delivery=Delivery(1, 0.0))
    assert [text for text, _ in (await stored(front, fine)).messages] == ["a", "", "", "", "🙂", "b"]
    await front.caches.aclose()


def crowd(front: Front, count: int) -> list[Ticket]:
    """So many others who are live."""
    return [front.admission.admit("others", str(number), None) for number in range(count)]


@pytest.mark.parametrize("cached", [False, True])
async def test_while_many_are_served_what_came_together_goes_together(cached: bool) -> None:
    case = replace(PLAIN, sizes=(2, 1), delivery=Delivery(1, 0.0, coalescing_delay=0.05))
    for others, sizes in ((MANY - 1, [1] * 6), (MANY, [2, 1, 3])):
        front = Front(case, cached)
        crowd(front, others)
        assert numbers(await front.read(case.request, "r")) == sizes
        await front.caches.aclose()
    front, strict = Front(case, cached), structs.replace(case.request, delivery=Delivery(1, 0.0))
    crowd(front, MANY)
    assert numbers(await front.read(strict, "r")) == [1] * 6
    await front.caches.aclose()


async def test_a_stored_answer_is_cut_when_the_crowd_has_gone_meanwhile() -> None:
    case = replace(PLAIN, sizes=(6,), delivery=Delivery(9, FOREVER))
    front = Front(case, cached=True)
    await front.read(case.request, "first")
    elastic = structs.replace(case.request, delivery=Delivery(1, 0.0, coalescing_delay=0.05))
    assert numbers(await stored(front, elastic)) == [1] * 6
    others = crowd(front, MANY)
    assert numbers(await front.read(elastic, "r")) == [6]
    recorder = Recorder()
    recorder.crowd = others
    await front.generator.stream(structs.replace(elastic, request_id="s"), Origin("t", 0.0, None), recorder)
    assert numbers(recorder) == [1] * 6
    await front.caches.aclose()
