"""Callers of every kind, each one request after the other, and the log of what they saw."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc

from bench.soaking.history import Began, EndedCall, Event, OracleQuestion
from service.pb.whippet.v1 import generation_pb2 as pb
from service.pb.whippet.v1.generation_pb2_grpc import GenerationServiceStub

TOKENS = 24  # of an answer
PATIENCE = 120.0  # seconds; who waits for longer was lost
PAUSE = 0.02  # seconds between two requests of a caller, on average
AGAIN = 1.0  # seconds that a refused caller waits at most
LATE = 0.15  # seconds that a slow reader takes for a message, at most
GENERATED = 0.3  # share of requests that no cache may answer
HURRY = 0.25  # seconds until the deadline of one that hurries, at most
WEIGHTS: Mapping[str, int] = {
    "unary": 25,
    "stream": 30,
    "sampled": 6,
    "slow": 6,
    "leaves": 12,
    "hurries": 12,
    "guest": 5,
    "stranger": 4,
}
UNCACHED = pb.CacheOptions(response=pb.CACHE_MODE_OFF, semantic=pb.CACHE_MODE_OFF, bypass_prefix=True)
VERBS = ("read", "write", "sort", "count", "merge", "parse", "find", "drop", "split", "close")
NOUNS = ("lines", "words", "files", "numbers", "names", "dates", "paths", "keys", "users", "pairs")
Metadata = tuple[tuple[str, str], ...]


def message(question: OracleQuestion, **fields: Any) -> pb.GenerateStreamRequest:
    asked = pb.GenerateStreamRequest(text=question.prompt, **fields)
    asked.stopping.max_tokens = TOKENS
    asked.sampling.temperature = 0.0
    return asked


def bearer(token: str) -> Metadata:
    return (("authorization", f"Bearer {token}"),)


def stub_of(channel: grpc.aio.Channel) -> Any:
    """Returns the generated stub, which has no types."""
    make: Any = GenerationServiceStub
    return make(channel)


def open_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


async def oracle(address: str, tenants: Sequence[str], each: int) -> tuple[list[OracleQuestion], int]:
    """Questions of which no two have one answer, so that a mix-up shows, `each` of a tenant, and how many were asked.
    Each is asked alone and without caches."""
    found: dict[str, OracleQuestion] = {}
    asked = 0
    async with open_channel(address) as channel:
        stub = stub_of(channel)
        for tenant in tenants:
            left = each
            for prompt in prompts(tenant):
                alone = message(OracleQuestion(tenant, prompt, ""), cache=UNCACHED)
                answer = await stub.Generate(_unary(alone), metadata=bearer(tenant), timeout=PATIENCE)
                asked += 1
                if answer.text and answer.text not in found:
                    found[answer.text] = OracleQuestion(tenant, prompt, answer.text)
                    left -= 1
                if left == 0:
                    break
            else:
                raise RuntimeError("this model gives the same answer to too many questions")
    return list(found.values()), asked


def prompts(tenant: str) -> Iterator[str]:
    """Yields short prompts, so that each is fed whole whatever runs beside it. They begin alike, so that pages are
    shared."""
    for verb, noun in itertools.product(VERBS, NOUNS):
        yield f"# for {tenant}, who wants something short and without comments\ndef {verb}_{noun}("


def pushback(error: grpc.aio.AioRpcError) -> int:
    """Returns the milliseconds until a caller may retry."""
    trailers: Any = error.trailing_metadata()
    pushback = [value for name, value in trailers if name == "grpc-retry-pushback-ms"]
    return int(pushback[0]) if pushback else 0


def _unary(asked: pb.GenerateStreamRequest) -> pb.GenerateRequest:
    return pb.GenerateRequest.FromString(asked.SerializeToString())


@dataclass(slots=True)
class _CallSeen:
    texts: list[str] = field(default_factory=list)
    finishes: int = 0
    late: bool = False
    entry: str = ""

    def take(self, answer: pb.GenerateResponse | pb.GenerateStreamResponse) -> None:
        self.late = self.late or self.finishes > 0
        self.texts.append(answer.text)
        if answer.HasField("finish"):
            self.finishes += 1
            self.entry = answer.finish.cache_hit.entry_id

    def ended(self, number: int, code: str) -> EndedCall:
        return EndedCall(number, code, tuple(self.texts), self.finishes, self.late, self.entry)


class SoakCallers:
    """Runs callers of one server at once, until they are stopped. Events are in the order in which callers saw them."""

    def __init__(self, address: str, questions: list[OracleQuestion], guest: str, count: int) -> None:
        self.events: list[Event] = []
        self._address = address
        self._questions = questions
        self._guest = guest
        self._numbers = itertools.count(1)
        self._count = count
        self._over = False

    async def run(self) -> None:
        """Returns once `stop` was called and every request has ended."""
        async with asyncio.TaskGroup() as group:
            for who in range(self._count):
                group.create_task(self._caller(random.Random(who)))

    def stop(self) -> None:
        self._over = True

    async def _caller(self, chance: random.Random) -> None:
        async with open_channel(self._address) as channel:
            stub = stub_of(channel)
            while not self._over:
                (kind,) = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
                owners = [one for one in self._questions if (one.tenant == self._guest) == (kind == "guest")]
                await self._ask(stub, kind, chance.choice(owners), chance)
                await asyncio.sleep(chance.expovariate(1 / PAUSE))

    async def _ask(self, stub: Any, kind: str, question: OracleQuestion, chance: random.Random) -> None:
        number, seen, code, again = next(self._numbers), _CallSeen(), "OK", 0
        self.events.append(Began(number, kind, question))
        try:
            async with aclosing(self._answers(stub, kind, question, chance)) as answers:
                async for answer in answers:
                    seen.take(answer)
        except grpc.aio.AioRpcError as error:
            code, again = error.code().name, pushback(error)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            code = "CANCELLED"  # of the call, by us
        self.events.append(seen.ended(number, code))
        await asyncio.sleep(min(AGAIN, again / 1000))

    async def _answers(
        self, stub: Any, kind: str, question: OracleQuestion, chance: random.Random
    ) -> AsyncGenerator[pb.GenerateResponse | pb.GenerateStreamResponse, None]:
        cache = UNCACHED if chance.random() < GENERATED else pb.CacheOptions()
        asked, token = message(question, cache=cache), "nobody" if kind == "stranger" else question.tenant
        if kind == "sampled":
            asked.sampling.temperature = 0.9
        if kind == "slow":
            asked.delivery.max_tokens_per_message = 1
        timeout = chance.uniform(0.001, HURRY) if kind == "hurries" else PATIENCE
        if kind in ("unary", "guest"):
            yield await stub.Generate(_unary(asked), metadata=bearer(token), timeout=timeout)
            return
        stays = chance.randrange(6) if kind == "leaves" else None  # messages
        call = stub.GenerateStream(asked, metadata=bearer(token), timeout=timeout)
        if stays == 0:
            call.cancel()
        place = 0
        async for answer in call:
            yield answer
            place += 1
            if place == stays:
                call.cancel()
            if kind == "slow":
                await asyncio.sleep(chance.uniform(0, LATE))
