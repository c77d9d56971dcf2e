"""The caches put together as a service holds them: two front processes on one Redis, and one alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache.answers.pump import Pump
from cache.api import (
    AnswerEnding,
    AnswerPart,
    CachedCompletion,
    CacheSettings,
    EntryKind,
    Mode,
    ModelIdentity,
    Question,
    RedisSettings,
    SemanticSettings,
    SemanticTurn,
    Verdict,
)
from cache.open.caches import Caches, open_caches
from cache.open.counters import Counters
from tests.cache.waiting import until

pytestmark = pytest.mark.product

MODEL = ModelIdentity(weights="w" * 64, tokenizer="t" * 64)
END = AnswerEnding(reason="stop", prompt_tokens=3, completion_tokens=3)
QUESTION = Question(tenant="acme", token_ids=(1, 2), parameters=(), max_tokens=9, deterministic=True)
TEXT = "How do I cook rice?"

Make = Callable[..., Caches]


@pytest.fixture
async def make(redis_server: Any, tmp_path: Path, counters: Counters) -> AsyncIterator[Make]:
    keys = tmp_path / "keys"
    keys.write_text("names " + "1" * 64 + "\na " + "2" * 64 + "\n")
    made: list[Caches] = []

    def build(redis: bool = True, **changes: Any) -> Caches:
        settings = CacheSettings(
            redis=RedisSettings(url=redis_server.url, budget=20.0, write_budget=20.0) if redis else None,
            key_file=keys,
            semantic=SemanticSettings(mode=Mode.OFF),
        )
        made.append(open_caches(replace(settings, **changes), MODEL, counters))
        return made[-1]

    yield build
    for caches in made:
        await caches.aclose()


def completion() -> CachedCompletion:
    parts = (AnswerPart((5,), "a"), AnswerPart((6, 7), "b", END, (1,)))
    return CachedCompletion(parts=parts, max_tokens=9, provenance="p", created_at=time.time())


class Engine:
    def __init__(self) -> None:
        self.runs = 0

    def generate(self) -> Pump:
        return Pump(self._run(), set())

    async def _run(self) -> AsyncGenerator[AnswerPart, None]:
        self.runs += 1
        for part in completion().parts:
            await asyncio.sleep(0.02)
            yield part


async def written(*caches: Caches) -> None:
    """Until nothing waits to be written."""

    async def empty() -> bool:
        return not any(sum(each.held.values()) for each in caches)

    await until(empty)


async def ask(caches: Caches, engine: Engine) -> tuple[AnswerPart, ...]:
    found = await caches.responses.get(QUESTION, caches.allowance())
    if found is not None:
        return found.parts
    async with caches.join(QUESTION, engine.generate) as parts:
        answer = tuple([part async for part in parts])
    await caches.responses.put(QUESTION, replace(completion(), parts=answer))
    return answer


@pytest.mark.parametrize("fronts", [1, 2])
async def test_a_hundred_identical_calls_are_one_generation(make: Make, fronts: int) -> None:
    engine = Engine()
    caches = [make() for _ in range(fronts)]
    answers = await asyncio.gather(*(ask(caches[i % fronts], engine) for i in range(100)))
    assert {"".join(part.text for part in answer) for answer in answers} == {"ab"}
    assert engine.runs == 1
    await written(*caches)
    assert (await ask(caches[-1], engine))[-1].ending == END
    assert engine.runs == 1


async def test_alone_without_redis(make: Make) -> None:
    engine, caches = Engine(), make(redis=False)
    await asyncio.gather(*(ask(caches, engine) for _ in range(20)))
    await ask(caches, engine)
    assert engine.runs == 1
    assert caches.states == {}


async def test_redis_that_is_not_there_is_no_obstacle(make: Make, unused_port: int) -> None:
    engine = Engine()
    caches = make()
    down = open_caches(
        CacheSettings(
            redis=RedisSettings(url=f"redis://127.0.0.1:{unused_port}/0"), semantic=SemanticSettings(mode=Mode.OFF)
        ),
        MODEL,
        Counters(),
    )
    assert len(await ask(down, engine)) == 2
    assert await down.partition("acme", down.allowance()) is None
    await down.aclose()
    assert await caches.partition("acme", caches.allowance()) is not None


async def test_questions_that_differ_each_time_do_not_fly_together(make: Make) -> None:
    with pytest.raises(ValueError, match="would differ"):
        make().join(replace(QUESTION, deterministic=False), Engine().generate)


async def test_flushing(make: Make) -> None:
    here, there = make(), make()
    other = replace(QUESTION, token_ids=(3,))
    for question in (QUESTION, other):
        await here.responses.get(question, here.allowance())
        await here.responses.put(question, completion())
    await written(here)
    found = await there.responses.get(QUESTION, there.allowance())
    assert found is not None
    assert await there.flush("acme", (EntryKind.RESPONSE, EntryKind.SEMANTIC), found.entry_id) == 1
    assert await here.responses.get(QUESTION, here.allowance()) is None
    assert await here.responses.get(other, here.allowance()) is not None
    assert await there.flush("nobody", (EntryKind.RESPONSE,)) == 0
    assert await there.flush("acme", (EntryKind.RESPONSE,)) == 1
    await here.responses.put(other, completion())
    await there.flush_tenant("acme")
    assert await here.responses.get(other, here.allowance()) is None


async def test_a_flushed_answer_cannot_be_joined_any_more(make: Make) -> None:
    engine = Engine()
    here, there = make(), make()
    await ask(here, engine)
    await written(here)
    assert await here.flush("acme", (EntryKind.RESPONSE,)) == 1
    await ask(here, engine)
    assert engine.runs == 2
    await written(here)
    assert await here.flush("acme", (EntryKind.RESPONSE,)) == 1
    await ask(there, engine)
    assert engine.runs == 3


async def test_partitions_are_per_tenant_and_shared(make: Make) -> None:
    here, there = make(), make()
    names = [await caches.partition(t, caches.allowance()) for caches in (here, there) for t in ("a", "b")]
    assert names[:2] == names[2:]
    assert names[0] != names[1]


async def test_the_real_embedder_from_end_to_end(make: Make) -> None:
    caches = make(semantic=SemanticSettings(mode=Mode.ON, audit=0.0))
    assert caches.semantic is None
    caches.load_semantic()
    assert await caches.loaded()
    semantic = caches.semantic
    assert semantic is not None
    what = SemanticTurn(question=QUESTION, context=b"", text=TEXT, greedy=True)
    assert await semantic.put(what, completion())
    await written(caches)
    found = await semantic.lookup(replace(what, text="how do i cook rice"), caches.allowance())
    assert found.verdict is Verdict.STRICT
    assert found.served is not None
    assert found.served.text == "ab"
    assert await caches.flush("acme", (EntryKind.RESPONSE, EntryKind.SEMANTIC), found.served.entry_id) == 1
    assert (await semantic.lookup(what, caches.allowance())).served is None


async def test_a_missing_embedder_is_said_and_survived(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caches = make(semantic=SemanticSettings(mode=Mode.ON, model=tmp_path / "none"))
    caches.load_semantic()
    assert not await caches.loaded()
    assert "no semantic cache" in caplog.text
