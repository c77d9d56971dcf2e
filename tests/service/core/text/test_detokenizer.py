"""The oracle is the tokenizers library: what all ids together decode to."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from service.core.text import Detokenizer, Piece, Tokenizer
from tests.properties import example_count

KINDS = ["byte-level", "byte-fallback", "metaspace", "word-piece", "plain-words"]
TABLED = ["byte-level", "byte-fallback"]

Pair = tuple[Tokenizer, Library]
Pairs = Callable[[str], Pair]


@pytest.fixture(scope="module")
def pair(folder: Callable[..., Path]) -> Pairs:
    made: dict[str, Pair] = {}

    def get(kind: str) -> Pair:
        if kind not in made:
            path = folder(kind)
            made[kind] = Tokenizer.load(path), Library.from_file(str(path / "tokenizer.json"))
        return made[kind]

    return get


def chunks(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=8)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def some_ids(kind: str, size: int) -> st.SearchStrategy[list[int]]:
    """Anything, ids that are not there too, with many single bytes where the vocabulary has them."""
    anything = st.integers(0, size + 3)
    single = st.integers(3, 258) if kind == "byte-fallback" else st.integers(5, 260)
    return st.lists(st.one_of(anything, single), max_size=60)


@pytest.mark.proof
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=example_count(150), deadline=None)
def test_pieces_make_the_librarys_text(pair: Pairs, kind: str, data: st.DataObject) -> None:
    tokenizer, library = pair(kind)
    ids = data.draw(some_ids(kind, tokenizer.vocab_size))
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(chunk) for chunk in chunks(data, ids)]
    text = "".join(piece.text for piece in pieces) + detokenizer.flush().text
    assert text == library.decode(ids, skip_special_tokens=True)
    assert text == tokenizer.decode(ids)
    assert sum(piece.ids for piece in pieces) == len(ids)
    assert all(piece.stop is None for piece in pieces)


@pytest.mark.parametrize("kind", TABLED)
@given(text=st.text(max_size=40))
@settings(max_examples=example_count(150), deadline=None)
def test_real_text_comes_whole_and_at_once(pair: Pairs, kind: str, text: str) -> None:
    """No character is sent in halves, and none waits for more than the token after it."""
    tokenizer, library = pair(kind)
    ids = library.encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer)
    sent = ""
    for count, token_id in enumerate(ids, 1):
        sent += detokenizer.push([token_id]).text
        whole = library.decode(ids[:count])
        assert whole.startswith(sent)
        if not whole.endswith("\ufffd") and kind == "byte-level":
            assert sent == whole
    assert sent + detokenizer.flush().text == library.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_special_and_unknown_ids_bring_no_text(pair: Pairs, kind: str) -> None:
    tokenizer, _ = pair(kind)
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([1, 2, tokenizer.vocab_size, 10**9]) == Piece("", None, 4, (0, 0, 0))
    assert detokenizer.flush() == Piece("", None, 0)


def test_a_character_in_bytes_waits_for_its_last(pair: Pairs) -> None:
    tokenizer, library = pair("byte-level")
    ids = library.encode("🦜").ids
    assert len(ids) == 4
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([token_id]).text for token_id in ids] == ["", "", "", "🦜"]


def test_bytes_of_a_fallback_run_are_judged_together(pair: Pairs) -> None:
    """One bad byte spoils its whole run, as in the library; the next word is not touched."""
    tokenizer, library = pair("byte-fallback")
    word = library.token_to_id("▁the") or library.token_to_id("▁")
    assert word is not None
    e_acute = [3 + 0xC3, 3 + 0xA9]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([i]).text for i in [*e_acute, word]][:2] == ["", ""]
    assert tokenizer.decode([*e_acute, word]).startswith("é ")
    broken = Detokenizer(tokenizer)
    out = broken.push([*e_acute, 3 + 0xFF, word]).text
    assert out == library.decode([*e_acute, 3 + 0xFF, word])
    assert out.startswith("\ufffd" * 3 + " ")


@pytest.mark.parametrize("kind", ["byte-fallback", "metaspace"])
def test_leading_space(pair: Pairs, kind: str) -> None:
    """Taken off where the answer stands alone, kept where it goes on from a text, always kept in between."""
    tokenizer, library = pair(kind)
    ids = library.encode("help the parser", add_special_tokens=False).ids
    alone, going_on = Detokenizer(tokenizer), Detokenizer(tokenizer, continues=True)
    texts = ["".join(d.push([i]).text for i in ids) + d.flush().text for d in (alone, going_on)]
    assert texts == ["help the parser", " help the parser"]


def expected(texts: list[str], stops: list[str], include: bool, least: int) -> tuple[str, str | None, int]:
    """By trying every end of the text in turn: the answer, its stop, its number of ids."""
    text = "".join(texts)
    owner = [number for number, part in enumerate(texts, 1) for _ in part]
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found and owner[end - 1] >= least:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop, owner[end - 1]
    return text, None, len(texts)


def withheld(text: str, stops: list[str]) -> str:
    """The longest end of the text that may still become a stop."""
    beginnings = [stop[:n] for stop in stops for n in range(1, len(stop))]
    return max((part for part in beginnings if text.endswith(part)), key=len, default="")


STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=6)


@pytest.mark.product
@given(data=st.data(), stops=STOPS, include=st.booleans(), least=st.integers(0, 12))
@settings(max_examples=example_count(400), deadline=None)
def test_stop_strings(data: st.DataObject, stops: list[str], include: bool, least: int) -> None:
    tokenizer = Tokenizer.of_bytes()
    text = data.draw(st.text("ab\n", max_size=40))
    answer, stop, count = expected(list(text), stops, include, least)
    detokenizer = Detokenizer(tokenizer, stops, include, least)
    sent, used, matched = "", 0, None
    for chunk in chunks(data, list(text.encode())):
        piece = detokenizer.push(chunk)
        sent, used, matched = sent + piece.text, used + piece.ids, piece.stop
        if matched is not None:
            break
        assert sent + withheld(text[:used], stops) == text[:used]
    else:
        sent += detokenizer.flush().text
    assert (sent, matched, used) == (answer, stop, count)


@pytest.mark.parametrize("kind", TABLED)
@given(data=st.data(), include=st.booleans(), least=st.integers(0, 20))
@settings(max_examples=example_count(150), deadline=None)
def test_stops_across_tokens_do_not_depend_on_chunks(
    pair: Pairs, kind: str, data: st.DataObject, include: bool, least: int
) -> None:
    tokenizer, library = pair(kind)
    source = data.draw(st.text("parse the\n\t🙂é<>", max_size=50))
    ids = library.encode(source, add_special_tokens=False).ids
    text = library.decode(ids)
    stops = [
        text[i : i + 3] for i in data.draw(st.lists(st.integers(0, max(0, len(text) - 3)), min_size=1, max_size=3))
    ]
    stops = [stop for stop in stops if stop] or ["x"]

    def run(parts: list[list[int]]) -> tuple[str, str | None, int]:
        detokenizer = Detokenizer(tokenizer, stops, include, least)
        sent, used = "", 0
        for part in parts:
            piece = detokenizer.push(part)
            sent, used = sent + piece.text, used + piece.ids
            if piece.stop is not None:
                return sent, piece.stop, used
        last = detokenizer.flush()
        return sent + last.text, last.stop, used

    one_by_one = run([[token_id] for token_id in ids])
    if kind == "byte-level":
        assert run(chunks(data, ids)) == one_by_one
    else:  # a run of bytes may end in an earlier push, whose ids are counted already
        assert run(chunks(data, ids))[:2] == one_by_one[:2]
    answer, stop, _ = one_by_one
    if stop is not None:
        assert text.startswith(answer)
        assert not include or answer.endswith(stop)


def test_newline_of_a_fallback_vocabulary_stops_before_the_next_id(pair: Pairs) -> None:
    tokenizer, library = pair("byte-fallback")
    newline, word = 3 + 10, library.token_to_id("▁the") or library.token_to_id("▁")
    assert word is not None
    at_once, word_text = Detokenizer(tokenizer, ["\n"]), tokenizer.decode([word])
    assert at_once.push([word, newline, word]) == Piece(word_text, "\n", 2, (len(word_text),))
    at_the_end = Detokenizer(tokenizer, ["\n"])
    assert at_the_end.push([newline]) == Piece("", None, 1)
    assert at_the_end.flush() == Piece("", "\n", 0)


def test_a_settled_newline_counts_as_the_token_that_made_it(pair: Pairs) -> None:
    """Token 2 is the newline, token 3 only settles it: no stop where three tokens are the least."""
    tokenizer, library = pair("byte-fallback")
    newline, word = 3 + 10, library.token_to_id("▁the") or library.token_to_id("▁")
    assert word is not None
    assert Detokenizer(tokenizer, ["\n"], min_tokens=2).push([word, newline, word]).stop == "\n"
    assert Detokenizer(tokenizer, ["\n"], min_tokens=3).push([word, newline, word]).stop is None


@pytest.mark.parametrize(("least", "piece"), [(2, Piece("", "\n", 0)), (3, Piece("\n", None, 0))])
def test_a_stop_that_only_the_end_settles_counts_as_well(pair: Pairs, least: int, piece: Piece) -> None:
    tokenizer, library = pair("byte-fallback")
    newline, word = 3 + 10, library.token_to_id("▁the") or library.token_to_id("▁")
    assert word is not None
    detokenizer = Detokenizer(tokenizer, ["\n"], min_tokens=least)
    assert detokenizer.push([word, newline]).stop is None
    assert detokenizer.flush() == piece


@pytest.mark.parametrize("kind", ["byte-level", "opaque-bytes"])
def test_half_a_character_waits_for_its_rest(pair: Pairs, kind: str) -> None:
    tokenizer, library = pair(kind)
    text = "a🦊ű 字 b"
    ids = library.encode(text).ids
    assert len(ids) > len(text)
    detokenizer = Detokenizer(tokenizer)
    texts = [detokenizer.push([token_id]).text for token_id in ids]
    assert "".join(texts) + detokenizer.flush().text == text
    assert not any("\ufffd" in piece for piece in texts)
    assert "" in texts


def test_after_a_stop_nothing_is_part_of_the_answer() -> None:
    detokenizer = Detokenizer(Tokenizer.of_bytes(), ["b"])
    assert detokenizer.push(b"abc") == Piece("a", "b", 2, (1,))
    assert detokenizer.push(b"d") == Piece("", "b", 0)
    assert detokenizer.flush() == Piece("", "b", 0)


def test_a_beginning_that_comes_to_nothing_is_flushed() -> None:
    detokenizer = Detokenizer(Tokenizer.of_bytes(), ["stop here"])
    assert detokenizer.push(b"please stop h").text == "please "
    assert detokenizer.flush() == Piece("stop h", None, 0)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Detokenizer(Tokenizer.of_bytes(), ["a", ""])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stops", [(), ("zzz", "\n\n\n\n", "paq")])
def test_a_long_answer_costs_in_proportion(pair: Pairs, kind: str, stops: tuple[str, ...]) -> None:
    tokenizer, library = pair(kind)
    ids = library.encode("the parser prints usage, 🙂 then help. ", add_special_tokens=False).ids

    def cost(count: int) -> float:
        detokenizer = Detokenizer(tokenizer, stops)
        start = time.process_time()
        for number in range(count):
            detokenizer.push([ids[number % len(ids)]])
        return time.process_time() - start

    small, large = (4_000, 100_000) if kind in TABLED else (400, 10_000)
    short = min(cost(small) for _ in range(3))
    assert cost(large) < 5 * 25 * short  # 25 times the tokens; a quadratic cost would be 625 times as much


def test_an_endless_broken_character_does_not_grow_the_window(pair: Pairs) -> None:
    """The general way out holds back at most a few ids."""
    tokenizer, _ = pair("metaspace")
    detokenizer = Detokenizer(tokenizer)
    unknown = tokenizer.encode("🜁")[-1]
    start = time.process_time()
    for _ in range(5_000):
        detokenizer.push([unknown])
    assert time.process_time() - start < 5
