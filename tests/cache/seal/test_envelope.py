"""What was tampered with does not open: 100,000 mutations, swaps, old versions, other keys."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.answers.codec import pack_completion, pack_part, unpack_completion, unpack_part
from cache.api import AnswerEnding, AnswerPart, CachedCompletion, CacheKey, EntryKind, InvalidKeyFile
from cache.open.counters import Counters
from cache.seal.envelope import OVERHEAD, Envelope
from cache.seal.keyring import Keyring, open_keyring
from tests.properties import example_count

KEY = CacheKey(EntryKind.RESPONSE, "ab" * 16, "0" * 64)
OTHER = replace(KEY, digest="1" * 64)


def rejected(counters: Counters) -> dict[str, int]:
    return {label: count for (event, label), count in counters.counts().items() if event == "cache_rejected"}


def test_opens_what_it_sealed_and_never_seals_alike(keyring: Keyring, counters: Counters) -> None:
    envelope = Envelope(keyring, 1000, counters)
    first, second = envelope.seal(KEY, b"value"), envelope.seal(KEY, b"value")
    assert first is not None
    assert second is not None
    assert first != second
    assert len(first) == 5 + OVERHEAD
    assert b"value" not in first
    assert envelope.open(KEY, first) == envelope.open(KEY, second) == b"value"
    assert rejected(counters) == {}


@pytest.mark.product
def test_a_hundred_thousand_mutations_open_to_nothing(keyring: Keyring, counters: Counters) -> None:
    envelope = Envelope(keyring, 2000, counters)
    chance = random.Random(4)
    values = [pack_completion(completion(text)) for text in ("yes", "no", "a longer answer " * 20)]
    sealed = [envelope.seal(KEY, value) for value in values]
    total = 100_000
    for number in range(total):
        original = sealed[number % len(sealed)]
        assert original is not None
        mutated = mutate(original, chance, [other for other in sealed if other is not None])
        if mutated == original:
            mutated += b"\0"
        assert mutated in sealed or envelope.open(KEY, mutated) is None
    same = sum(rejected(counters).values())
    assert same > 0.99 * total
    assert set(rejected(counters)) == {"short", "long", "foreign", "version", "key", "forged"}


def mutate(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    kind = chance.randrange(7)
    place = chance.randrange(len(data))
    if kind == 0:
        return data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :]
    if kind == 1:
        return data[:place]
    if kind == 2:
        return data + chance.randbytes(chance.randrange(1, 3000))
    if kind == 3:
        other = chance.choice(others)
        return data[:place] + other[place:]
    if kind == 4:
        return data[:place] + data[place + chance.randrange(1, 9) :]
    if kind == 5:
        return chance.randbytes(len(data))
    head = chance.randrange(8)
    return data[:head] + bytes([chance.randrange(256)]) + data[head + 1 :]


def test_a_value_under_another_name_does_not_open(keyring: Keyring, counters: Counters) -> None:
    envelope = Envelope(keyring, 1000, counters)
    sealed = envelope.seal(KEY, b"value")
    assert sealed is not None
    for other in (OTHER, replace(KEY, partition="cd" * 16), replace(KEY, kind=EntryKind.SEMANTIC)):
        assert envelope.open(other, sealed) is None
    assert rejected(counters) == {"forged": 3}


def test_too_large_is_not_sealed(keyring: Keyring, counters: Counters) -> None:
    envelope = Envelope(keyring, 10, counters)
    assert envelope.seal(KEY, bytes(11)) is None
    assert envelope.seal(KEY, bytes(10)) is not None
    assert counters.counts()["cache_too_large", "response"] == 1


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_keys_rotate(tmp_path: Path, counters: Counters) -> None:
    names, old, new = (f"{i}" * 64 for i in (1, 2, 3))
    before = open_keyring(write(tmp_path / "a", f"names {names}", f"2025 {old}"))
    during = open_keyring(write(tmp_path / "b", "# rotated", f"2026 {new}", f"2025 {old}", f"names {names}"))
    after = open_keyring(write(tmp_path / "c", f"names {names}", f"2026 {new}"))
    assert before.names == during.names == after.names
    assert before.shared
    sealed_old = Envelope(before, 100, counters).seal(KEY, b"value")
    sealed_new = Envelope(during, 100, counters).seal(KEY, b"value")
    assert sealed_old is not None
    assert sealed_new is not None
    assert Envelope(during, 100, counters).open(KEY, sealed_old) == b"value"
    assert Envelope(after, 100, counters).open(KEY, sealed_new) == b"value"
    assert Envelope(after, 100, counters).open(KEY, sealed_old) is None
    assert rejected(counters) == {"key": 1}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no line begins with 'names'"),
        (["names " + "1" * 64], "no key for values"),
        (["a " + "1" * 64], "no line begins with 'names'"),
        (["names " + "1" * 64, "a " + "2" * 62], "31 bytes"),
        (["names " + "1" * 64, "a zz" + "2" * 62], "not hexadecimal"),
        (["names " + "1" * 64, "a"], "expected a label"),
        (["names " + "1" * 64, "a " + "2" * 64, "a " + "3" * 64], "twice"),
        (["names " + "1" * 64, "a " + "2" * 64, "b " + "2" * 64], "twice"),
    ],
)
def test_bad_key_files_are_refused_without_saying_the_key(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(InvalidKeyFile, match=message) as caught:
        Keyring.read(write(tmp_path / "keys", *lines))
    assert "2222" not in str(caught.value)


def test_a_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidKeyFile, match="FileNotFoundError"):
        open_keyring(tmp_path / "none")


def test_a_generated_key_is_said_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        ring = open_keyring(None)
    assert "no key file" in caplog.text
    assert not ring.shared
    assert ring.names.hex() not in caplog.text + repr(ring)
    assert open_keyring(None).names != ring.names


def completion(text: str) -> CachedCompletion:
    ending = AnswerEnding(reason="stop", prompt_tokens=3, completion_tokens=len(text), stop_token_id=2)
    parts = (AnswerPart(tuple(range(len(text))), text), AnswerPart((), "", ending))
    return CachedCompletion(parts=parts, max_tokens=900, provenance="p", created_at=1.5)


IDS = st.lists(st.integers(0, 2**32 - 1), max_size=6).map(tuple)
ENDINGS = st.builds(
    AnswerEnding,
    reason=st.text(max_size=9),
    prompt_tokens=st.integers(0, 2**31),
    completion_tokens=st.integers(0, 2**31),
    stop_token_id=st.none() | st.integers(0, 2**32 - 1),
    stop_string=st.none() | st.text(max_size=5),
)


@given(
    parts=st.lists(st.builds(AnswerPart, IDS, st.text(max_size=20), st.none(), st.just(())), max_size=6),
    last=st.builds(AnswerPart, IDS, st.text(max_size=20), ENDINGS, st.just(())),
    max_tokens=st.integers(1, 2**31),
)
@settings(max_examples=example_count(150), deadline=None)
def test_answers_come_back_with_their_borders(parts: list[AnswerPart], last: AnswerPart, max_tokens: int) -> None:
    answer = CachedCompletion(
        parts=(*parts, last), max_tokens=max_tokens, provenance="eager/bf16", created_at=12.25, entry_id="00" * 32
    )
    assert unpack_completion(pack_completion(answer), "00" * 32) == answer
    for part in answer.parts:
        cut = part._replace(cuts=tuple(range(len(part.token_ids) - 1)))
        assert unpack_part(pack_part(cut)) == cut
    cut = answer.parts[-1]._replace(cuts=(0,))  # for followers of a stream alone
    assert unpack_completion(pack_completion(replace(answer, parts=(*parts, cut))), "00" * 32) == answer


@given(st.binary(max_size=200))
@settings(max_examples=example_count(300), deadline=None)
def test_bytes_of_any_kind_are_no_answer(data: bytes) -> None:
    assert unpack_completion(data, "00" * 32) is None


def test_unfinished_or_of_another_schema_is_no_answer() -> None:
    whole = completion("yes")
    open_ended = replace(whole, parts=whole.parts[:-1])
    twice = replace(whole, parts=(whole.parts[-1], *whole.parts))
    for answer in (open_ended, twice, replace(whole, parts=())):
        assert unpack_completion(pack_completion(answer), "00" * 32) is None
    packed = pack_completion(whole)
    assert packed[1] == 2
    assert unpack_completion(packed[:1] + b"\x01" + packed[2:], "00" * 32) is None


@pytest.mark.parametrize("number", [-1, 1 << 32])
def test_what_is_no_id_is_no_answer(number: int) -> None:
    part = AnswerPart((1, number), "x")
    assert unpack_part(pack_part(part)) is None
    whole = completion("yes")
    assert unpack_completion(pack_completion(replace(whole, parts=(part, *whole.parts))), "00" * 32) is None
