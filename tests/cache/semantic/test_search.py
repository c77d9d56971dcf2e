"""The semantic cache as a whole, on both stores: what is served, what never is, and who sees a change how soon."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.api import (
    Allowance,
    AnswerEnding,
    AnswerPart,
    CachedCompletion,
    CacheKey,
    EntryKind,
    Mode,
    ModelIdentity,
    Question,
    SemanticSettings,
    SemanticTurn,
    Store,
    Verdict,
)
from cache.open.counters import Counters
from cache.seal.context import CacheContext
from cache.seal.envelope import Envelope
from cache.seal.keyring import Keyring
from cache.seal.partition import Epochs, Partitions
from cache.semantic import candidates
from cache.semantic.embedder import Vector
from cache.semantic.evidence import CALLERS, DAY, RIGHT_A_DAY, TENANT_A_DAY, Evidence
from cache.semantic.observations import DIRECTORY_DIGITS
from cache.semantic.search import SimilarCache
from cache.store.memory import MemoryStore
from cache.store.redis_store import RedisStore
from tests.cache.waiting import plain_wait, until

MODEL = ModelIdentity(weights="w" * 64, tokenizer="t" * 64)
DATA = Path(__file__).parent / "data"
ON = SemanticSettings(mode=Mode.ON, audit=0.0)
SELL = "How do I sell a used car?"


class WordEmbedder:
    """Sums a random vector a word: near where the words are the same, whatever their order. 1 token a word."""

    digest = "words"
    width = 64

    def tokens(self, text: str) -> int:
        return len(text.split())

    def embed(self, text: str) -> Vector:
        total = np.zeros(self.width, np.float32)
        for word in text.lower().strip("?.").split():
            total += np.random.default_rng(sum(word.encode()) * 7919 + len(word)).standard_normal(self.width)
        return (total / max(float(np.linalg.norm(total)), 1e-6)).astype(np.float32)


def turn(text: str, **changes: Any) -> SemanticTurn:
    """`changes` are of the question where it has such a field, else of the turn."""
    question = Question(
        tenant="acme",
        token_ids=tuple(text.encode()),
        parameters=(("temperature", 0.0),),
        max_tokens=100,
        deterministic=True,
    )
    of_question = {name: value for name, value in changes.items() if name in Question.__slots__}
    rest = {name: value for name, value in changes.items() if name not in of_question}
    return SemanticTurn(
        **{"question": replace(question, **of_question), "context": b"c", "text": text, "greedy": True, **rest}
    )


def answer(text: str = "42", reason: str = "stop") -> CachedCompletion:
    ending = AnswerEnding(reason=reason, prompt_tokens=3, completion_tokens=2)
    parts = (AnswerPart((1, 2), text), AnswerPart((), "", ending))
    return CachedCompletion(parts=parts, max_tokens=100, provenance="p", created_at=time.time())


class Clock:
    """All replicas' wall clock: half a day passes between observations, so that all of them count."""

    now = 1.7e9

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


class Replica:
    def __init__(
        self,
        store: Store,
        keyring: Keyring,
        counters: Counters,
        settings: SemanticSettings = ON,
        embedder: WordEmbedder | None = None,
    ) -> None:
        partitions = Partitions(keyring, MODEL)
        self.store = store
        self.epochs = Epochs(store, partitions)
        context = CacheContext(store, partitions, self.epochs, Envelope(keyring, 1 << 20, counters), counters)
        self.cache = SimilarCache(context, embedder or WordEmbedder(), settings, chance=random.Random(1), clock=CLOCK)

    async def put(self, what: SemanticTurn, completion: CachedCompletion | None = None) -> bool:
        kept = await self.cache.put(what, completion or answer())
        if isinstance(self.store, RedisStore):
            await self.store.drained()
        return kept

    async def look(self, what: SemanticTurn) -> Any:
        return await self.cache.lookup(what, Allowance(5.0))


Make = Callable[..., Replica]


@pytest.fixture
async def make(store: Store, keyring: Keyring, counters: Counters) -> AsyncIterator[Make]:
    made: list[Replica] = []

    def build(
        settings: SemanticSettings = ON, ring: Keyring = keyring, embedder: WordEmbedder | None = None
    ) -> Replica:
        made.append(Replica(store, ring, counters, settings, embedder))
        return made[-1]

    yield build
    for replica in made:
        await replica.cache.aclose()


async def test_the_same_words_are_served_and_a_vetoed_or_distant_one_is_not(make: Make) -> None:
    replica = make()
    assert (await replica.look(turn(SELL))).verdict is Verdict.EMPTY
    assert await replica.put(turn(SELL))
    found = await replica.look(turn("how do i sell a used car"))
    assert found.verdict is Verdict.STRICT
    assert found.served is not None
    assert found.served.text == "42"
    assert found.candidate is not None
    assert 0.5 < found.candidate.similarity <= 1.0001
    assert len(found.served.entry_id) == 64
    wrong = await replica.look(turn("How do I not sell a used car?"))
    assert (wrong.verdict, wrong.served, wrong.veto) == (Verdict.VETOED, None, "negation")
    assert (await replica.look(turn("What do cows eat?"))).verdict is Verdict.EMPTY


async def test_a_vetoed_nearest_does_not_hide_the_right_one(make: Make) -> None:
    replica = make()
    await replica.put(turn("How do I sell a used car now and then?"), answer("never mind"))
    await replica.put(turn("How do I sell a used 2 car?"), answer("wrong"))
    await replica.put(turn(SELL), answer("right"))
    found = await replica.look(turn("how do i sell a used car", context=b"c"))
    assert found.served is not None
    assert found.served.text == "right"


class OneVector(WordEmbedder):
    """Takes every text for the same."""

    def tokens(self, text: str) -> int:
        return 9

    def embed(self, text: str) -> Vector:
        return np.eye(1, self.width, dtype=np.float32)[0]


@pytest.mark.product
@pytest.mark.parametrize("half", ["tuning", "held_out"])
async def test_case_and_signs_keep_questions_apart_where_the_vectors_do_not(
    half: str, keyring: Keyring, counters: Counters
) -> None:
    replica = Replica(MemoryStore(1 << 24), keyring, counters, ON, OneVector())
    rows = [json.loads(line) for line in (DATA / f"signs_{half}.jsonl").read_text().splitlines()]
    ways = [(row["a"], row["b"]) for row in rows] + [(row["b"], row["a"]) for row in rows]
    for number, (one, other) in enumerate(ways):
        apart = f"{number}".encode()
        assert await replica.put(turn(one, context=apart))
        found = await replica.look(turn(other, context=apart, caller="somebody"))
        assert (found.verdict, found.served) == (Verdict.VETOED, None), (one, other)
    await replica.cache.aclose()


async def test_shadow_decides_and_never_serves(make: Make) -> None:
    replica = make(replace(ON, mode=Mode.SHADOW))
    await replica.put(turn(SELL))
    found = await replica.look(turn(SELL))
    assert (found.verdict, found.served) == (Verdict.STRICT, None)
    assert found.candidate is not None


async def test_off_does_nothing(make: Make, store: Store) -> None:
    replica = make(replace(ON, mode=Mode.OFF))
    assert not await replica.put(turn(SELL))
    assert (await replica.look(turn(SELL))).verdict is Verdict.SKIPPED


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": "other"},
        {"context": b"another system prompt"},
        {"context": b""},
        {"parameters": (("temperature", 0.0), ("stop", ("x",)))},
    ],
)
async def test_only_the_last_turn_is_fuzzy(make: Make, change: dict[str, Any]) -> None:
    replica = make()
    await replica.put(turn(SELL))
    assert (await replica.look(turn(SELL, **change))).verdict is Verdict.EMPTY
    assert (await replica.look(turn(SELL))).verdict is Verdict.STRICT


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (turn(SELL, greedy=False), "not_greedy"),
        (turn(SELL, deterministic=False), "not_greedy"),
        (turn(SELL, plain=False), "not_plain"),
        (turn("mail bob.smith@example.com about it"), "personal"),
        (turn("call me on 0170 1234567 please"), "personal"),
        (turn("what is the weather today"), "fleeting"),
    ],
)
async def test_what_is_not_eligible(make: Make, counters: Counters, what: SemanticTurn, reason: str) -> None:
    replica = make()
    assert not await replica.put(what)
    assert (await replica.look(what)).verdict is Verdict.SKIPPED
    assert counters.counts()["semantic_skipped", reason] == 1


async def test_too_short_and_too_long_are_skipped_never_truncated(make: Make) -> None:
    replica = make()
    preamble = "word " * 250
    for text in ("two words", preamble + "what is 2 + 2", preamble + "write a poem"):
        assert not await replica.put(turn(text))
        assert (await replica.look(turn(text))).verdict is Verdict.SKIPPED


async def test_limits_hold_as_for_exact_hits(make: Make) -> None:
    replica = make()
    assert not await replica.put(turn(SELL), answer(reason="length"))
    await replica.put(turn(SELL), replace(answer(), created_at=time.time() - 100))
    assert (await replica.look(turn(SELL, max_tokens=2))).served is None
    assert (await replica.look(turn(SELL, max_age=50.0))).served is None
    assert (await replica.look(turn(SELL, max_age=500.0, max_tokens=3))).served is not None


async def test_callers_tighten_and_never_loosen(make: Make) -> None:
    replica = make()
    await replica.put(turn(SELL))
    asked = "Hi, how do I sell a used car?"
    assert (await replica.look(turn(asked, threshold=0.9999))).served is None
    assert (await replica.look(turn(asked, threshold=0.1))).served is not None
    assert (await replica.look(turn("How do I sell a used bicycle for cash?", threshold=0.01))).served is None


async def test_another_replica_sees_additions_deletions_and_purges_at_once(make: Make, store: Store) -> None:
    here, there = make(), make()
    assert (await there.look(turn(SELL))).verdict is Verdict.EMPTY
    await here.put(turn(SELL))
    found = await there.look(turn(SELL))
    assert found.verdict is Verdict.STRICT
    await store.delete_many([found.candidate.entry])
    for replica in (here, there):
        assert (await replica.look(turn(SELL))).served is None
    await here.put(turn(SELL), answer("new"))
    assert (await there.look(turn(SELL))).served.text == "new"
    await here.epochs.bump("acme")
    for replica in (there, here):
        for _ in range(2):
            assert (await replica.look(turn(SELL))).served is None


async def test_a_replica_that_starts_late_catches_up(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = make(), make()
    for number in range(200):
        await here.put(turn(f"tell me about item number {number} of the list"), answer(str(number)))
    asked = turn("tell me about item number 199 of the list")

    async def there_too() -> bool:
        return (await there.look(asked)).served is not None

    await until(there_too)
    found = (await there.look(asked)).served
    assert found is not None
    assert found.text == "199"


async def test_a_lost_directory_or_database_is_followed_anew(
    make: Make, store: Store, keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "RESYNC_EVERY", 0.0)
    here, there = make(), make()
    await here.put(turn(SELL))
    assert (await there.look(turn(SELL))).served is not None
    # Everything goes, as with FLUSHALL, and others begin anew.
    epoch = here.epochs.known("acme")
    assert epoch is not None
    partition = Partitions(keyring, MODEL).of("acme", epoch)
    for kind in (EntryKind.SEMANTIC, EntryKind.DIRECTORY):
        await store.delete_many([key async for key in store.scan(kind, partition)])
    for replica in (here, there):
        assert (await replica.look(turn(SELL))).served is None
    fresh = make()
    await fresh.put(turn(SELL), answer("anew"))
    for replica in (here, there):
        assert (await replica.look(turn(SELL))).served.text == "anew"


async def test_a_swapped_or_broken_value_is_a_miss(make: Make, store: Store, counters: Counters) -> None:
    here = make()
    await here.put(turn(SELL), answer("mine"))
    await here.put(turn("What do cows eat?"), answer("grass"))
    mine = (await here.look(turn(SELL))).candidate.entry
    cows = (await here.look(turn("What do cows eat?"))).candidate.entry
    (value,) = await store.get_many([cows])
    assert value is not None
    await store.set(mine, value, 60)
    assert (await here.look(turn(SELL))).served is None
    await store.set(cows, b"nonsense", 60)
    assert (await here.look(turn("What do cows eat?"))).served is None
    assert counters.counts()["cache_rejected", "forged"] == 1
    assert counters.counts()["cache_rejected", "short"] == 1


# With a bound of a tenth, 28 right ones are proof.
LOOSE = replace(ON, threshold=0.55, strict_threshold=0.55, error_bound=0.1)
QUICKLY = "How do I sell a used car quickly?"


async def agree(replica: Replica, text: str, count: int, callers: int = CALLERS, said: str = "42") -> None:
    """So many of the callers' questions, two a day, whose answer was generated as well, and was the same."""
    for number in range(count):
        CLOCK.now += DAY / 2
        asked = turn(text, caller=f"caller {number % callers}")
        await replica.cache.observe(asked, await replica.look(asked), answer(said))


async def test_learned_hits_need_evidence_and_lose_it(make: Make) -> None:
    replica = make(LOOSE)
    await replica.put(turn(SELL))
    asked = turn(QUICKLY, caller="somebody else")
    found = await replica.look(asked)
    assert (found.verdict, found.served) == (Verdict.UNPROVEN, None)
    assert found.candidate is not None
    await agree(replica, QUICKLY, 27)
    assert (await replica.look(asked)).verdict is Verdict.UNPROVEN
    await agree(replica, QUICKLY, CALLERS, said=" 42 ")
    learned = await replica.look(asked)
    assert learned.verdict is Verdict.LEARNED
    assert learned.served is not None
    await replica.cache.observe(asked, learned, answer("something else"))
    assert (await replica.look(asked)).served is None


async def test_evidence_of_one_entry_is_lent_to_others_but_not_to_one_that_was_wrong(make: Make) -> None:
    replica = make(LOOSE)
    await replica.put(turn(SELL))
    await agree(replica, QUICKLY, 40)
    await replica.put(turn("Where do I mend an old bicycle?"), answer("there"))
    asked = turn("Where do I mend an old bicycle quickly?", caller="somebody else")
    found = await replica.look(asked)
    assert found.verdict is Verdict.LEARNED
    await replica.cache.observe(asked, found, answer("elsewhere"))
    await agree(replica, QUICKLY, 40)
    assert (await replica.look(turn(QUICKLY, caller="somebody else"))).verdict is Verdict.LEARNED
    assert (await replica.look(asked)).verdict is Verdict.UNPROVEN


@pytest.mark.product
async def test_one_caller_cannot_buy_evidence_for_what_others_ask(make: Make) -> None:
    """Harmless questions, as many and as unlike as it likes, and those of others stay unserved. Four callers who find
    the same thing harmless open that, and nothing else. No similarity tells these questions apart."""
    replica = make(LOOSE, embedder=OneVector())
    await replica.put(turn(SELL))
    harmless = [f"How do I sell a used car {word}?" for word in ("quickly", "cheaply", "soon", "well")]
    others = ["How do I sell a used boat?", "How do I sell a stolen car?", "How do I rent a used car?"]
    for text in harmless:
        await agree(replica, text, 60, callers=1)
    for text in (*harmless, *others):
        assert (await replica.look(turn(text, caller="victim"))).served is None
    await agree(replica, harmless[0], 40, callers=5)
    assert (await replica.look(turn(harmless[0], caller="victim"))).verdict is Verdict.LEARNED
    for text in (*harmless[1:], *others):
        assert (await replica.look(turn(text, caller="victim"))).served is None


async def rush(replica: Replica, text: str, count: int, callers: Sequence[int]) -> None:
    """So many of the callers' observations at one instant."""
    found = await replica.look(turn(text, caller="caller 0"))
    for number in range(count):
        caller = f"caller {callers[number % len(callers)]}"
        await replica.cache.observe(turn(text, caller=caller), found, answer())


async def test_twenty_credentials_buy_no_evidence_in_a_day(keyring: Keyring, counters: Counters) -> None:
    """Nor do many differences at once: see the numbers in `evidence`."""
    replica = Replica(MemoryStore(1 << 24), keyring, counters, replace(ON, threshold=0.55, strict_threshold=0.55))
    await replica.put(turn(SELL))
    asked, midnight = turn(QUICKLY, caller="victim"), (CLOCK.now // DAY + 1) * DAY
    for day, callers in enumerate(((0, 1), (2, 3), (0, 1, 2, 3))):
        assert (await replica.look(asked)).verdict is Verdict.UNPROVEN
        CLOCK.now = midnight + day * DAY
        await rush(replica, QUICKLY, RIGHT_A_DAY, callers)
        await rush(replica, QUICKLY, 60, range(20))
    assert (await replica.look(asked)).verdict is Verdict.LEARNED
    assert counters.counts()["semantic_observed", "uncounted"] == 3 * 60
    CLOCK.now += DAY
    for word in (
        "well",
        "soon",
        "cheaply",
        "fast",
        "slowly",
        "quietly",
        "gladly",
        "online",
        "legally",
        "swiftly",
        "up",
    ):
        await rush(replica, f"How do I sell a used car {word}?", RIGHT_A_DAY, (0, 1))
    kept = await replica.cache._observations.read(await evidence_of(replica, replica.store), None)
    assert sum(sum(each.right.values()) for each in kept if each.today and each.last == int(CLOCK.now)) == TENANT_A_DAY
    await replica.cache.aclose()


async def test_callers_without_a_name_learn_nothing(make: Make, store: Store, counters: Counters) -> None:
    replica = make(LOOSE)
    await replica.put(turn(SELL))
    for _ in range(40):
        await replica.cache.observe(turn(QUICKLY), await replica.look(turn(QUICKLY)), answer())
    assert counters.counts()["semantic_observed", "right"] == 40
    assert (await replica.look(turn(QUICKLY))).verdict is Verdict.UNPROVEN
    assert await evidence_of(replica, store) == []


async def evidence_of(replica: Replica, store: Store) -> list[CacheKey]:
    partition = replica.cache._context.partitions.of("acme", replica.epochs.known("acme") or b"")
    found = [key async for key in store.scan(EntryKind.EVIDENCE, partition)]
    return [key for key in found if len(key.digest) == 2 * DIRECTORY_DIGITS]  # and not those of a tenant's day


async def test_evidence_is_sealed_to_its_name(make: Make, store: Store, counters: Counters) -> None:
    """It can be taken away by whoever writes to the store, and not made."""
    replica = make(LOOSE)
    await replica.put(turn(SELL))
    await agree(replica, QUICKLY, 40)
    await agree(replica, "How do I sell a used car cheaply?", CALLERS)
    asked = turn("How do I sell a used car cheaply?", caller="somebody else")
    assert (await replica.look(turn(QUICKLY, caller="x"))).verdict is Verdict.LEARNED
    proof, weak = await evidence_of(replica, store)
    if not (await replica.cache._observations.read([proof], None))[0].counted > 30:
        proof, weak = weak, proof
    (value,) = await store.get_many([proof])
    assert value is not None
    forged = Evidence({bytes([caller]) * 8: 10 for caller in range(CALLERS)}).packed()
    for forgery in (value, value[:-1], value[:-1] + b"x", forged, b"400", b""):
        await store.set(weak, forgery, 60)
        assert (await replica.look(asked)).verdict is Verdict.UNPROVEN
    assert sum(count for (event, _), count in counters.counts().items() if event == "cache_rejected") == 6
    await agree(replica, asked.text, CALLERS)  # begins anew
    assert (await replica.cache._observations.read([weak], None))[0].counted == CALLERS


async def test_replicas_add_to_the_same_evidence(make: Make, store: Store) -> None:
    here, there = make(LOOSE), make(LOOSE)
    await here.put(turn(SELL))
    await asyncio.gather(*(agree(replica, QUICKLY, 20) for replica in (here, there)))
    (kept,) = await evidence_of(here, store)
    seen = (await here.cache._observations.read([kept], None))[0]
    assert 20 <= seen.counted <= 40  # where both try at once again and again, one gives up


async def test_an_audit_that_fails_deletes_the_entry_and_stops_strict_serving(make: Make) -> None:
    replica = make(replace(ON, audit=1.0))
    await replica.put(turn(SELL))
    await replica.put(turn("What do cows eat?"))
    found = await replica.look(turn(SELL))
    assert found.audit
    await replica.cache.observe(turn(SELL), found, answer("no"))
    assert (await replica.look(turn(SELL))).served is None
    # One wrong of one audited: the bound does not hold for what else stands there.
    assert (await replica.look(turn("What do cows eat?"))).served is None


async def test_audits_are_as_frequent_as_configured(make: Make) -> None:
    replica = make(replace(ON, audit=0.2))
    await replica.put(turn(SELL))
    audits = sum([(await replica.look(turn(SELL))).audit for _ in range(300)])
    assert 30 <= audits <= 95


async def test_faults_are_misses_within_the_budget(
    make_redis: Callable[..., Any], keyring: Keyring, counters: Counters
) -> None:
    from cache.api import RedisSettings

    server = make_redis()
    store = RedisStore(RedisSettings(url=server.url, budget=20.0, write_budget=20.0), counters)
    warm = Replica(store, keyring, counters)
    await warm.put(turn(SELL))
    assert (await warm.look(turn(SELL))).served is not None
    server.pause()
    taken, plain = [], []
    for _ in range(50):
        plain.append(await plain_wait(0.02))
        begun = time.perf_counter()
        found = await warm.cache.lookup(turn(SELL), Allowance(0.02))
        taken.append(time.perf_counter() - begun)
        assert found.verdict is Verdict.FAULT
    assert sorted(taken)[-2] < 3 * max(plain)
    server.resume()
    await warm.cache.aclose()
    await store.aclose()


async def test_no_text_in_labels(make: Make, counters: Counters) -> None:
    replica = make()
    await replica.put(turn(SELL))
    await replica.look(turn(SELL))
    await replica.look(turn("How do I not sell a used car?"))
    assert "car" not in str(counters.counts())


@pytest.mark.parametrize(
    "changes",
    [{"threshold": 0.3}, {"strict_threshold": 0.95}, {"max_tokens": 300}, {"error_bound": 0.0}, {"audit": 2.0}],
)
def test_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must (be|hold)"):
        SemanticSettings(**changes)


class SlowEmbedder(WordEmbedder):
    """Waits until it may go on, and counts."""

    def __init__(self) -> None:
        self.embedded: list[str] = []
        self.begun, self.may = threading.Event(), threading.Event()

    def embed(self, text: str) -> Vector:
        self.embedded.append(text)
        self.begun.set()
        assert self.may.wait(60)
        return super().embed(text)


@pytest.fixture
async def slow(keyring: Keyring, counters: Counters) -> AsyncIterator[tuple[SimilarCache, SlowEmbedder]]:
    embedder, store, partitions = SlowEmbedder(), MemoryStore(1 << 20), Partitions(keyring, MODEL)
    context = CacheContext(store, partitions, Epochs(store, partitions), Envelope(keyring, 1 << 20, counters), counters)
    cache = SimilarCache(context, embedder, ON)
    yield cache, embedder
    embedder.may.set()
    await cache.aclose()


async def test_what_was_begun_is_not_done_again(slow: tuple[SimilarCache, SlowEmbedder]) -> None:
    cache, embedder = slow
    cache.begin(turn(SELL))
    looking = asyncio.create_task(cache.lookup(turn(SELL), Allowance(5.0)))
    assert await asyncio.to_thread(embedder.begun.wait, 10)
    embedder.may.set()
    assert (await looking).verdict is Verdict.EMPTY
    assert embedder.embedded == [SELL]


async def test_what_is_given_up_before_its_turn_is_never_done(slow: tuple[SimilarCache, SlowEmbedder]) -> None:
    cache, embedder = slow
    cache.begin(turn(SELL))
    assert await asyncio.to_thread(embedder.begun.wait, 10)
    for number in range(50):
        cache.begin(turn(f"How do I sell {number} used cars?"))()
    embedder.may.set()
    assert (await cache.lookup(turn("What do cows eat?"), Allowance(5.0))).verdict is Verdict.EMPTY
    assert embedder.embedded == [SELL, "What do cows eat?"]


@pytest.mark.parametrize(
    "what",
    [
        turn(SELL, greedy=False),
        turn("call me on 0170 1234567 please"),
        turn("two words"),
        turn("What is the weather like today?"),
    ],
)
async def test_nothing_is_begun_for_what_is_not_eligible(
    slow: tuple[SimilarCache, SlowEmbedder], what: SemanticTurn
) -> None:
    cache, embedder = slow
    embedder.may.set()
    cache.begin(what)()
    cache.begin(what)
    assert (await cache.lookup(what, Allowance(5.0))).verdict is Verdict.SKIPPED
    await cache.lookup(turn("What do cows eat?"), Allowance(5.0))  # whose turn comes after theirs
    assert embedder.embedded == ["What do cows eat?"]
