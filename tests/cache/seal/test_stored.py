"""What lies in Redis, byte for byte: replicas of two versions share it, so that a change is a change of version.

`data/stored.json` holds names and sealed values that were made of what stands here, with the keys in the file and every
nonce 00 01 02 …: by version 0.1.0, and those of similar questions and their evidence since rules and evidence changed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.answers.codec import pack_part, unpack_completion
from cache.answers.cross_process import INDEX
from cache.answers.exact import ExactCache
from cache.answers.lease import Lease
from cache.api import (
    Allowance,
    AnswerCandidate,
    AnswerEnding,
    AnswerPart,
    BlockLayout,
    BlockRun,
    CachedCompletion,
    CacheKey,
    EntryKind,
    Mode,
    ModelIdentity,
    Question,
    ResponseSettings,
    SemanticLookup,
    SemanticSettings,
    SemanticTurn,
    Verdict,
)
from cache.kv_blocks.codec import RunCodec
from cache.open.counters import Counters
from cache.seal.context import CacheContext
from cache.seal.envelope import Envelope
from cache.seal.keyring import Keyring
from cache.seal.partition import PREFIXES, Epochs, Partitions
from cache.semantic.embedder import Vector
from cache.semantic.search import SimilarCache
from cache.store.memory import MemoryStore

STORED: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "stored.json").read_text())
EPOCH = bytes(range(16))
QUESTION = Question(
    tenant="tenant",
    token_ids=(1, 2, 70000),
    parameters=(
        ("temperature", 0.0),
        ("top_k", 0),
        ("seed", None),
        ("logit_bias", ((5, -1.5),)),
        ("stop_strings", ("\n", "é")),
        ("continues", True),
    ),
    max_tokens=9,
    deterministic=True,
)
TURN = SemanticTurn(
    question=QUESTION,
    context=("chat", (("system", "Be brief."), ("user", "Hi"))),
    text="How do I reset my password?",
    greedy=True,
    caller="caller",
)
NEAR = "How do I reset my old password?"
LAYOUT = BlockLayout(layers=2, kv_heads=1, head_dim=4, dtype="bfloat16", item_bytes=2, page_size=16, variant="v")
RUN = BlockRun(bytes(range(32)), bytes(range(32, 64)), 16)


def answer(reason: str, **stop: Any) -> CachedCompletion:
    ending = AnswerEnding(reason=reason, prompt_tokens=3, completion_tokens=9 if reason == "length" else 3, **stop)
    parts = (AnswerPart((5, 6), "Hel"), AnswerPart((70000,), "lö", ending))
    return CachedCompletion(parts=parts, max_tokens=9, provenance="eager bf16", created_at=12.25)


ANSWERS = (answer("stop", stop_token_id=2), answer("length"), answer("stop_string", stop_string="é"))


class Recorder(MemoryStore):
    """Writes down what it is given."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.epochs: list[str] = []
        self.offered: list[list[str | None]] = []
        self.swapped: list[list[str]] = []

    async def set_if_absent(self, key: CacheKey, value: bytes, ttl: float, within: float | None = None) -> bytes:
        self.epochs.append(key.name)
        return await super().set_if_absent(key, EPOCH, ttl, within)

    def offer(self, key: CacheKey, value: bytes, ttl: float, directory: CacheKey | None = None) -> bool:
        self.offered.append([key.name, value.hex(), None if directory is None else directory.name])
        return super().offer(key, value, ttl, directory)

    async def swap(self, key: CacheKey, old: bytes | None, value: bytes, ttl: float) -> bool:
        self.swapped.append([key.name, value.hex()])
        return await super().swap(key, old, value, ttl)


class Corner:
    width, digest = 4, "stub"

    def tokens(self, text: str) -> int:
        return 5

    def embed(self, text: str) -> Vector:
        return np.array([0.5, 0.5, -0.5, 0.5], np.float32)


@pytest.fixture
def keys(tmp_path: Path) -> Keyring:
    path = tmp_path / "keys"
    path.write_text("\n".join(STORED["keys"]))
    return Keyring.read(path)


@pytest.fixture
def context(keys: Keyring, monkeypatch: pytest.MonkeyPatch) -> CacheContext:
    monkeypatch.setattr("os.urandom", lambda count: bytes(range(count)))
    store, counters = Recorder(), Counters()
    identity = ModelIdentity(weights="weights", tokenizer="tokenizer", adapter="adapter")
    partitions = Partitions(keys, identity)
    return CacheContext(store, partitions, Epochs(store, partitions), Envelope(keys, 1 << 20, counters), counters)


def recorded(context: CacheContext) -> Recorder:
    assert isinstance(context.store, Recorder)
    return context.store


def key_of(name: str) -> CacheKey:
    kind, partition, digest = name.split(":")
    return CacheKey(EntryKind(kind), partition, digest)


async def test_exact_answers(context: CacheContext) -> None:
    cache = ExactCache(context, ResponseSettings())
    for one in ANSWERS:
        assert await cache.put(QUESTION, one)
    assert recorded(context).epochs == STORED["asked"]
    assert recorded(context).offered == STORED["offered"][:3]


async def test_similar_questions_and_their_evidence(context: CacheContext) -> None:
    cache = SimilarCache(context, Corner(), SemanticSettings(mode=Mode.ON), clock=lambda: 1e9)
    assert await cache.put(TURN, answer("stop"))
    assert recorded(context).offered == STORED["offered"][3:]
    entry = key_of(STORED["offered"][3][0])
    near = AnswerCandidate(entry=entry, text=NEAR, similarity=0.93, strict=False, completion=answer("stop"))
    wrong = replace(answer("stop"), parts=(AnswerPart((9,), "no", answer("stop").ending),))
    for strict in (False, True):
        found = SemanticLookup(verdict=Verdict.LEARNED, candidate=replace(near, strict=strict))
        for generated in (answer("stop"), wrong):
            await cache.observe(TURN, found, generated)
    assert recorded(context).swapped == STORED["swapped"]
    await cache.aclose()


def test_epochs(context: CacheContext) -> None:
    names = {context.partitions.epoch_key("tenant").name, context.partitions.epoch_key("tenant", PREFIXES).name}
    assert sorted(names) == STORED["epochs"]


def test_leases_and_the_streams_of_their_holders(context: CacheContext) -> None:
    key = ExactCache(context, ResponseSettings()).key(QUESTION, EPOCH, 9)
    lease = Lease(CacheKey(EntryKind.LEASE, key.partition, key.digest), "ab" * 16)
    assert (lease.key.name, lease.stream.name) == (STORED["lease"], STORED["stream"])
    assert streamed(context, lease, answer("stop").parts) == STORED["items"]


def streamed(context: CacheContext, lease: Lease, parts: Sequence[AnswerPart]) -> list[str]:
    items = [INDEX.pack(place) + pack_part(part) for place, part in enumerate(parts)]
    return [(context.envelope.seal(lease.stream, item) or b"").hex() for item in items]


def test_runs_of_pages(keys: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.urandom", lambda count: bytes(range(count)))
    codec = RunCodec(keys, LAYOUT, Counters())
    key = codec.key("ab" * 16, RUN)
    payload = bytes(i % 251 for i in range(codec.payload_bytes(RUN)))
    assert [key.name, codec.seal(key, RUN, payload).hex()] == STORED["block"]


async def test_what_an_older_server_wrote_is_read(context: CacheContext, keys: Keyring) -> None:
    for name, sealed, _ in STORED["offered"][:3]:
        data = context.envelope.open(key_of(name), bytes.fromhex(sealed))
        assert data is not None
        found = unpack_completion(data, "")
        assert found in ANSWERS
    name, sealed, directory = STORED["offered"][3]
    store = context.store
    await store.set_if_absent(context.partitions.epoch_key("tenant"), EPOCH, 60)
    assert store.offer(key_of(name), bytes.fromhex(sealed), 60, key_of(directory))
    cache = SimilarCache(context, Corner(), SemanticSettings(mode=Mode.ON))
    hit = await cache.lookup(TURN, Allowance(60))
    assert hit.verdict is Verdict.STRICT
    assert hit.served is not None
    assert hit.served.text == "Hellö"
    await cache.aclose()
    codec = RunCodec(keys, LAYOUT, Counters())
    name, sealed = STORED["block"]
    into = memoryview(bytearray(codec.payload_bytes(RUN)))
    assert codec.open(key_of(name), RUN, memoryview(bytes.fromhex(sealed)), into)
    assert bytes(into) == bytes(i % 251 for i in range(len(into)))
