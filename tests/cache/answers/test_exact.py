"""What is an exact hit, what must never be one, and that a fault is a miss."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.answers.exact import ExactCache
from cache.api import (
    Allowance,
    AnswerEnding,
    AnswerPart,
    CachedCompletion,
    CacheKey,
    DirectoryPage,
    EntryKind,
    ModelIdentity,
    Question,
    ResponseSettings,
    Store,
    StoreFault,
)
from cache.open.counters import Counters
from cache.seal.context import CacheContext
from cache.seal.envelope import Envelope
from cache.seal.keyring import Keyring
from cache.seal.partition import Epochs, Partitions, encode
from cache.store.memory import MemoryStore
from cache.store.redis_store import RedisStore

MODEL = ModelIdentity(weights="w" * 64, tokenizer="t" * 64)
QUESTION = Question(
    tenant="acme",
    token_ids=(1, 2, 3),
    parameters=(("temperature", 0.0), ("top_k", 0), ("seed", None), ("stop", ("END",)), ("system", 1)),
    max_tokens=50,
    deterministic=True,
)


def answer(reason: str = "stop", tokens: int = 10, max_tokens: int = 50) -> CachedCompletion:
    ending = AnswerEnding(reason=reason, prompt_tokens=3, completion_tokens=tokens)
    parts = (AnswerPart((5, 6), "Hel"), AnswerPart((7,), "lo"), AnswerPart((), "", ending))
    return CachedCompletion(parts=parts, max_tokens=max_tokens, provenance="p", created_at=time.time())


class Replica:
    """One process's view of a store."""

    def __init__(self, store: Store, keyring: Keyring, counters: Counters, identity: ModelIdentity = MODEL) -> None:
        partitions = Partitions(keyring, identity)
        self.store = store
        self.epochs = Epochs(store, partitions)
        envelope = Envelope(keyring, 1 << 20, counters)
        self.cache = ExactCache(CacheContext(store, partitions, self.epochs, envelope, counters), ResponseSettings())

    async def get(self, question: Question) -> CachedCompletion | None:
        return await self.cache.get(question, Allowance(5.0))

    async def put(self, question: Question, completion: CachedCompletion) -> bool:
        kept = await self.cache.put(question, completion)
        if isinstance(self.store, RedisStore):
            await self.store.drained()
        return kept


@pytest.fixture
def replica(store: Store, keyring: Keyring, counters: Counters) -> Replica:
    return Replica(store, keyring, counters)


async def test_a_hit_is_the_answer_with_its_borders(replica: Replica) -> None:
    assert await replica.get(QUESTION) is None
    stored = answer()
    assert await replica.put(QUESTION, stored)
    found = await replica.get(QUESTION)
    assert found is not None
    assert tuple(found.replay()) == stored.parts
    assert (found.text, found.token_ids, found.created_at) == ("Hello", (5, 6, 7), stored.created_at)
    assert len(found.entry_id) == 64


async def test_another_tenant_never_hits_and_the_same_one_does(
    store: Store, keyring: Keyring, counters: Counters
) -> None:
    here, there = Replica(store, keyring, counters), Replica(store, keyring, counters)
    await here.put(QUESTION, answer())
    assert await there.get(QUESTION) is not None
    for tenant in ("acme ", "ACME", "", "acm", "acmee"):
        assert await there.get(replace(QUESTION, tenant=tenant)) is None
        assert await here.get(replace(QUESTION, tenant=tenant)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": (1, 2)},
        {"token_ids": (1, 2, 3, 4)},
        {"token_ids": (3, 2, 1)},
        {"token_ids": (9, 1, 2, 3)},
        *({"parameters": tuple(row if i != j else (row[0], "other") for j, row in enumerate(QUESTION.parameters))}
          for i in range(len(QUESTION.parameters))),
        {"parameters": QUESTION.parameters[:-1]},
        {"parameters": (("temperature", 0), *QUESTION.parameters[1:])},
    ],
)  # fmt: skip
async def test_any_change_is_a_miss(replica: Replica, change: dict[str, Any]) -> None:
    await replica.put(QUESTION, answer())
    assert await replica.get(replace(QUESTION, **change)) is None
    assert await replica.get(QUESTION) is not None


@pytest.mark.parametrize("field", ["weights", "tokenizer", "adapter"])
async def test_another_model_is_a_miss(store: Store, keyring: Keyring, counters: Counters, field: str) -> None:
    await Replica(store, keyring, counters).put(QUESTION, answer())
    other = Replica(store, keyring, counters, replace(MODEL, **{field: "x"}))
    assert await other.get(QUESTION) is None


async def test_other_secrets_are_a_miss(store: Store, keyring: Keyring, counters: Counters) -> None:
    await Replica(store, keyring, counters).put(QUESTION, answer())
    assert await Replica(store, Keyring.generate(), counters).get(QUESTION) is None
    assert await Replica(store, replace(keyring, names=bytes(32)), counters).get(QUESTION) is None


@pytest.mark.parametrize("reason", ["stop", "stop_string"])
async def test_what_stopped_by_itself_serves_every_limit_it_stays_below(replica: Replica, reason: str) -> None:
    assert await replica.put(QUESTION, answer(reason, tokens=10, max_tokens=50))
    for limit, hit in ((50, True), (51, True), (100_000, True), (11, True), (10, False), (9, False), (1, False)):
        assert (await replica.get(replace(QUESTION, max_tokens=limit)) is not None) is hit, limit


async def test_what_stopped_at_its_limit_serves_that_limit(replica: Replica) -> None:
    await replica.put(replace(QUESTION, max_tokens=10), answer(tokens=10, max_tokens=10))
    assert await replica.get(replace(QUESTION, max_tokens=10)) is not None
    assert await replica.get(replace(QUESTION, max_tokens=9)) is None


async def test_what_was_cut_serves_that_very_limit(replica: Replica) -> None:
    assert await replica.put(QUESTION, answer("length", tokens=50))
    assert await replica.get(QUESTION) is not None
    for limit in (49, 51, 10):
        assert await replica.get(replace(QUESTION, max_tokens=limit)) is None


@pytest.mark.parametrize(
    ("question", "completion"),
    [
        (QUESTION, answer("time_budget")),
        (QUESTION, answer("cancelled")),
        (QUESTION, answer("error")),
        (QUESTION, answer("length", tokens=30)),  # cut by the context, which another replica may have more of
        (QUESTION, answer("length", tokens=50, max_tokens=60)),
        (QUESTION, answer("length", tokens=60, max_tokens=60)),  # of another question
        (replace(QUESTION, deterministic=False), answer()),
        (QUESTION, replace(answer(), parts=answer().parts[:-1])),
        (QUESTION, replace(answer(), parts=())),
    ],
)
async def test_what_is_not_whole_and_repeatable_is_not_kept(
    replica: Replica, question: Question, completion: CachedCompletion
) -> None:
    assert not await replica.put(question, completion)
    assert await replica.get(replace(question, deterministic=True)) is None


async def test_a_request_that_is_not_deterministic_is_not_looked_up(replica: Replica) -> None:
    await replica.put(QUESTION, answer())
    assert await replica.get(replace(QUESTION, deterministic=False)) is None


async def test_too_old_is_a_miss(replica: Replica) -> None:
    await replica.put(QUESTION, replace(answer(), created_at=time.time() - 100))
    assert await replica.get(replace(QUESTION, max_age=99.0)) is None
    assert await replica.get(replace(QUESTION, max_age=200.0)) is not None


async def test_a_purge_is_seen_by_every_replica_at_once(store: Store, keyring: Keyring, counters: Counters) -> None:
    here, there = Replica(store, keyring, counters), Replica(store, keyring, counters)
    other = replace(QUESTION, tenant="other")
    for question in (QUESTION, other):
        await here.put(question, answer())
        assert await there.get(question) is not None
    await here.epochs.bump("acme")
    assert await there.get(QUESTION) is None
    assert await here.get(QUESTION) is None
    assert await there.get(other) is not None
    await there.put(QUESTION, answer())
    assert await here.get(QUESTION) is not None


async def test_a_lost_epoch_is_a_purge_not_a_return(store: Store, keyring: Keyring, counters: Counters) -> None:
    here, there = Replica(store, keyring, counters), Replica(store, keyring, counters)
    await here.put(QUESTION, answer())
    await store.delete_many([Partitions(keyring, MODEL).epoch_key("acme")])
    assert await there.get(QUESTION) is None
    assert await here.get(QUESTION) is None
    await here.put(QUESTION, answer())
    assert await there.get(QUESTION) is not None


async def test_one_entry_can_be_deleted(replica: Replica, store: Store, keyring: Keyring) -> None:
    await replica.put(QUESTION, answer())
    found = await replica.get(QUESTION)
    assert found is not None
    epoch = replica.epochs.known("acme")
    assert epoch is not None
    partition = Partitions(keyring, MODEL).of("acme", epoch)
    assert [key.digest async for key in store.scan(EntryKind.RESPONSE, partition)] == [found.entry_id]
    assert await store.delete_many([CacheKey(EntryKind.RESPONSE, partition, found.entry_id)]) == 1
    assert await replica.get(QUESTION) is None


async def test_a_swapped_value_is_a_miss_and_counted(
    replica: Replica, store: Store, keyring: Keyring, counters: Counters
) -> None:
    await replica.put(QUESTION, answer())
    other = replace(QUESTION, token_ids=(4,))
    await replica.put(other, answer())
    epoch = replica.epochs.known("acme")
    assert epoch is not None
    mine, theirs = (replica.cache.key(question, epoch, None) for question in (QUESTION, other))
    (value,) = await store.get_many([theirs])
    assert value is not None
    await store.set(mine, value, 60)
    assert await replica.get(QUESTION) is None
    assert counters.counts()["cache_rejected", "forged"] == 1


class Broken(MemoryStore):
    """Raises StoreFault on everything it is asked."""

    async def get_many(self, keys: Sequence[CacheKey], within: float | None = None) -> tuple[bytes | None, ...]:
        raise StoreFault("broken")

    async def set_if_absent(self, key: CacheKey, value: bytes, ttl: float, within: float | None = None) -> bytes:
        raise StoreFault("broken")

    async def members(
        self, directory: CacheKey, after: float, count: int, within: float | None = None
    ) -> DirectoryPage:
        raise StoreFault("broken")

    async def counts(self, keys: Sequence[CacheKey], within: float | None = None) -> tuple[Mapping[str, int], ...]:
        raise StoreFault("broken")


async def test_a_broken_store_is_a_miss(keyring: Keyring, counters: Counters) -> None:
    replica = Replica(Broken(1 << 20), keyring, counters)
    assert await replica.get(QUESTION) is None
    assert not await replica.put(QUESTION, answer())
    assert counters.counts()["response_lookup", "fault"] == 1


async def test_names_tell_nothing(replica: Replica, store: Store, keyring: Keyring) -> None:
    await replica.put(QUESTION, answer())
    if isinstance(store, MemoryStore):
        names = " ".join(store._entries)
        assert "acme" not in names
        assert "Hello" not in str([entry.value for entry in store._entries.values()])


PARAMETERS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)


def exact(value: Any) -> Any:
    """Equality that tells 1, 1.0 and True apart, and 0.0 from −0.0."""
    return [exact(part) for part in value] if isinstance(value, tuple) else (type(value).__name__, repr(value))


@given(PARAMETERS, PARAMETERS)
def test_two_values_never_share_an_encoding(one: Any, other: Any) -> None:
    assert (encode(one) == encode(other)) == (exact(one) == exact(other))
