"""Splits a question into words and normalizes the variations that cannot change its meaning.

Two questions are equal if their words are the same in the same order. Only these variations are ignored: runs of
blanks, a blank before the last question mark, the capital of a common word that begins a sentence, the final mark of a
sentence that its words make a question or a request, courtesies at the start or end, apostrophes (`whats`, `what’s`),
and the case of `I` and of names without another meaning. In a question about text, or with signs that may be code, none
is ignored; if the question may mention words rather than use them, only the capital of its first word is.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from cache.semantic import lexicon as lex

_CHUNK = re.compile(r"([^\W_]+(?:[-'’.,:/][^\W_]+)*%?)([,;:.?!]?)")  # a word and the mark after it
_MARKS = ",;:.?!"
_APART = re.compile(r"(?<=[A-Za-z0-9]) +\?$")  # a question mark that a blank stands before
_LETTERS = re.compile(r"[A-Za-z]+")
_REQUEST = re.compile(r"(?:please |(?:can|could|would|will) you please )")
_LAST = re.compile(r"[A-Za-z0-9]+(?:['-][A-Za-z]+)*%?")  # a word that a mark after it cannot belong to


@dataclass(frozen=True, slots=True)
class Words:
    words: tuple[str, ...]  # normalized, with their marks; equal for equal questions
    bare: tuple[str, ...]  # normalized, without marks; the rules of `guard` read these
    letters: str  # the whole text, case-folded, without signs, blanks and accents


@dataclass(slots=True)
class _Chunk:
    body: str
    mark: str

    @property
    def lower(self) -> str:
        return self.body.lower()


@lru_cache(maxsize=4096)
def words_of(text: str) -> Words:
    letters = "".join(filter(str.isalnum, unicodedata.normalize("NFKD", text).casefold()))
    spoken = frozenset(_LETTERS.findall(text.lower()))
    mentioned = not lex.MENTIONING.isdisjoint(spoken)
    stripped = text.strip(" \r\n")
    chunks = _chunks(stripped if mentioned else _APART.sub("?", stripped))
    if not chunks or not lex.ABOUT_TEXT.isdisjoint(spoken) or (mentioned and "  " in text):
        return Words((text,), tuple(bare for word in text.split() if (bare := word.strip(_MARKS))), letters)
    if mentioned:
        _fold_capitals(chunks, [0])
    else:
        chunks = _reworded(chunks)
    return Words(tuple(each.body + each.mark for each in chunks), tuple(each.body for each in chunks), letters)


def _reworded(chunks: list[_Chunk]) -> list[_Chunk]:
    _spell(chunks)
    chunks = _without_courtesies(chunks)
    _fold_capitals(chunks, _starts(chunks))
    _fold_names(chunks)
    chunks = _expanded(chunks)
    _drop_last_mark(chunks[_starts(chunks)[-1] :])
    return chunks


def _chunks(text: str) -> list[_Chunk]:
    """Empty if a sign may be code, a quotation or another kind of blank."""
    found = [_CHUNK.fullmatch(word) for word in text.split(" ") if word]
    return [] if None in found else [_Chunk(each[1], each[2]) for each in found if each is not None]


def _spell(chunks: list[_Chunk]) -> None:
    for at, chunk in enumerate(chunks):
        body = chunk.body.replace("’", "'")
        lower = body.lower()
        used = at == 0 or (
            lower.endswith("nt") and at + 1 < len(chunks) and (at == 1 or chunks[at - 1].lower in lex.SUBJECTS)
        )
        if used and lower in lex.APOSTROPHES and body[1:] == lower[1:]:
            body = body[0] + lex.APOSTROPHES[lower][1:]
        chunk.body = "can't" if body == "cannot" else body


def _without_courtesies(chunks: list[_Chunk]) -> list[_Chunk]:
    """Removes `Hi, `, `Please `, `Please, ` before a question, `Could you please `, `, please` and `. Thanks!`."""
    chunks = _without_farewell(chunks)
    if len(chunks) > 2 and chunks[0].lower in lex.GREETINGS and chunks[0].mark == "," and _opens(chunks[1:]):
        chunks = chunks[1:]
    if chunks[0].lower == "please" and chunks[0].mark == "," and _asks([each.lower for each in chunks[1:]]):
        return chunks[1:]
    polite = _REQUEST.match(" ".join(each.lower + each.mark for each in chunks))
    count = polite[0].count(" ") if polite else 0
    if len(chunks) <= count or chunks[count].lower not in lex.REQUESTS:
        return chunks
    if count > 1 and chunks[-1].mark == "?":  # only the removed `could you` made this a question
        chunks[-1].mark = ""
    return chunks[count:]


def _without_farewell(chunks: list[_Chunk]) -> list[_Chunk]:
    count = 2 if [each.lower for each in chunks[-2:]] == ["thank", "you"] else 1
    if len(chunks) < count + 2 or (count == 1 and chunks[-1].lower not in lex.FAREWELLS):
        return chunks
    rest, before = chunks[: -count - 1], chunks[-count - 1]
    if before.mark == "," and chunks[-count].mark in ("", chunks[-1].mark):
        return [*rest, _Chunk(before.body, chunks[-1].mark.replace("!", ""))]
    sentence = before.mark in ("?", "!", ".") and chunks[-1].lower != "please" and chunks[-1].mark != "?"
    return [*rest, before] if sentence else chunks


def _opens(chunks: Sequence[_Chunk]) -> bool:
    """Whether a sentence's first word is no name, so that its capital means nothing."""
    first = chunks[0].lower
    after = chunks[1].body if len(chunks) > 1 else ""
    if first in lex.NAMES_TOO:  # such as the name Will
        return after.lower() in lex.SUBJECTS
    if first in lex.VERBS_TOO:
        return after.lower() in lex.SUBJECTS or (after.isalpha() and after.islower() and after not in lex.HELPERS)
    return first in lex.OPENERS or first.removesuffix("n't") in lex.ASKING or first.removesuffix("'s") in lex.QUESTIONS


def _starts(chunks: Sequence[_Chunk]) -> list[int]:
    """No sentence begins after a short or cut word, as in `Dr.`, because a name may follow."""

    def ends(chunk: _Chunk) -> bool:
        word = re.fullmatch(r"[a-z]{4,}", chunk.body) is not None and chunk.body not in lex.CUT
        return chunk.mark in ("?", "!") or (chunk.mark == "." and word)

    return [0, *(at + 1 for at, each in enumerate(chunks[:-1]) if ends(each))]


def _fold_capitals(chunks: list[_Chunk], starts: Sequence[int]) -> None:
    for at in starts:
        body = chunks[at].body
        if body[0].isupper() and body[1:] == body[1:].lower() and _opens(chunks[at:]):
            chunks[at].body = body.lower()


def _fold_names(chunks: list[_Chunk]) -> None:
    for at, chunk in enumerate(chunks):
        body = chunk.body
        if body.lower() in ("i'm", "i've", "i'll", "i'd"):
            chunk.body = f"I{body[1:].lower()}"
        elif body == "i" and _asks_for_itself(chunks, at):
            chunk.body = "I"
        elif body.removesuffix("'s").lower() in lex.NAMES and body[1:] == body[1:].lower():
            chunk.body = body.lower()


def _asks_for_itself(chunks: Sequence[_Chunk], at: int) -> bool:
    """Whether the `i` at this index is the pronoun, as in `do i need` but not in `can i and j differ`."""
    if at == 0:
        return not chunks[0].mark and len(chunks) > 1 and chunks[1].body in lex.AFTER_PRONOUN
    around = chunks[at - 1 : at + 2]
    if len(around) < 3 or around[0].mark or around[1].mark:
        return False
    after = around[2].body
    verb = re.fullmatch(r"[a-z]{2,}", after) is not None and after not in lex.AFTER_LETTERS and not after.endswith("s")
    return around[0].lower in lex.BEFORE_PRONOUN and verb


def _expanded(chunks: list[_Chunk]) -> list[_Chunk]:
    """Expands `what's` to `what is` before a determiner; before other words it may mean `what has`."""
    first, *rest = chunks
    found = re.fullmatch(r"(what|who|where|how)'s", first.body)
    if found is None or first.mark or not rest or rest[0].body not in lex.DETERMINERS:
        return chunks
    return [_Chunk(found[1], ""), _Chunk("is", ""), *rest]


def _drop_last_mark(sentence: Sequence[_Chunk]) -> None:
    last = sentence[-1]
    if any(each.mark for each in sentence[:-1]) or not _LAST.fullmatch(last.body):
        return
    first = sentence[0].lower
    states = (first in lex.REQUESTS and len(sentence) > 1) or (first in ("i", "my") and len(sentence) > 3)
    if (last.mark == "?" and _asks([each.lower for each in sentence])) or (last.mark == "." and states):
        last.mark = ""


def _asks(words: Sequence[str]) -> bool:
    """Whether these words, without a mark, can only be a question. `how nice you are` is an exclamation."""
    if len(words) < 3:
        return False
    first, second = words[0], words[1]
    if first in lex.NAMES_TOO | lex.VERBS_TOO:
        several = second.endswith("s") and second not in lex.OBJECTS and first in lex.VERBS_TOO
        return second in lex.SUBJECTS or several
    if first not in lex.QUESTIONS:
        return first.removesuffix("n't") in lex.ASKING or first.removesuffix("'s") in lex.QUESTIONS
    if first in ("who", "whose", "which") or not lex.HELPERS.isdisjoint((second, second.removesuffix("n't"))):
        return True
    if second in ("to", "many", "happens", "happened"):
        return first in ("what", "how")
    # matches `how far is the moon` and `what time does it start`
    asked = (word for before, word in pairwise(words[1:5]) if before not in lex.SUBJECTS and word != words[-1])
    return first in ("what", "how") and not lex.HELPERS.isdisjoint(asked)
