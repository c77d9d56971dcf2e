"""Case and signs of a question: dropped where they cannot change what it asks, kept word for word everywhere else.

Everything is significant unless a rule below says otherwise. What follows no rule becomes a *verbatim* word, which no
later step reads: `C#`, `\\S`, `5'`, `.NET`, `i++`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cache.semantic import lexicon as lex

_QUOTED = re.compile(r'"([^"]*)"|“([^“”]*)”')
_KEPT = re.compile("\x00(\\d+)\x00")
_WORD = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*")
_NUMERIC = re.compile(
    r"[$€£¥₹]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"  # 5, 1,000.5, $5, .5
    r"|[0-9]+(?:\.[0-9]+)?(?:[%€]|°[CF]?|[A-Za-z]+)"  # 20%, 30°C, 5km, 16th, 1990s
    r"|°[CF]?|km/h"
)
_SUM = re.compile(r"(?<!\S)[0-9]+(?:\+[0-9]+)+(?=[?.!,]?(?:\s|$))")
_OPERATORS = re.compile(r"[\\^$*+?.|(){}\[\]!&<>=~@]")  # after one of these a final `?` may belong to what stands there
_YEAR = re.compile(r"1[0-9]{3}|20[0-9]{2}")
_FRONTS = "in|at|for|on|during|with|when|if|as|after|before"
_FRONTED = re.compile(rf"(?:{_FRONTS}) [^,?!.;:]{{1,80}}, (\w+)\b[^,;:]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Folded:
    """A question's text with case and signs dropped where they say nothing. Words stand one blank apart."""

    text: str  # verbatim words as \x00number\x00
    kept: tuple[str, ...]  # the verbatim words, in backquotes, and quotations
    names: frozenset[str]  # words written as names, in lower case

    def restored(self, word: str) -> str:
        """A word of `text` as it was written."""
        return _KEPT.sub(lambda found: self.kept[int(found[1])], word)


@dataclass(slots=True)
class _Chunk:
    """What stands between two blanks."""

    body: str
    tail: str  # punctuation at its end

    @property
    def lower(self) -> str:
        return self.body.lower()


def folded(plain: str) -> Folded:
    """`plain`: one line, NFC, with straight apostrophes, without NUL and backquotes."""
    quoted = [f'"{a or b}"' for a, b in _QUOTED.findall(plain)]
    numbers = iter(range(len(quoted)))
    text = _QUOTED.sub(lambda _: f"\x00{next(numbers)}\x00", plain)
    text = _SUM.sub(lambda found: found[0].replace("+", " + "), text)
    chunks = _without_farewell([_chunk(word) for word in text.split()])
    kept, names = list(quoted), set()
    if chunks:
        _end(chunks)
    fronted = _fronted(chunks)
    before: list[_Chunk] = []
    for at, chunk in enumerate(chunks):
        opening = _opens(before)
        word = _folded_word(chunk.body, opening, fronted and at == 0, before, chunks[at + 1 :])
        if _is_name(chunk, word, opening):
            names.add(chunk.lower.removesuffix("'s"))
        if word is None:
            kept.append(f"`{_KEPT.sub(lambda found: quoted[int(found[1])], chunk.body)}`")
            word = f"\x00{len(kept) - 1}\x00"
        before.append(_Chunk(word, chunk.tail))
    return Folded(" ".join(chunk.body + chunk.tail for chunk in before), tuple(kept), frozenset(names))


def _chunk(word: str) -> _Chunk:
    body = word.rstrip(",;:.?!")
    if not body or len(word) - len(body) > 1:  # `..`, `x?.`: not the end of a word
        return _Chunk(word, "")
    return _Chunk(body, word[len(body) :])


def _without_farewell(chunks: list[_Chunk]) -> list[_Chunk]:
    """Takes off `, please` and `. Thanks!`; without a sign before it, the word belongs to the sentence."""
    words = [chunk.lower for chunk in chunks]
    count = 2 if words[-2:] == ["thank", "you"] else 1 if words and words[-1] in ("please", "thanks") else 0
    if not 0 < count < len(chunks) or chunks[-1].tail not in ("", ".", "!", "?"):
        return chunks
    rest, before = chunks[:-count], chunks[-count - 1]
    if not before.tail or any(chunk.tail for chunk in chunks[-count:-1]):
        return chunks
    ending = chunks[-1].tail.replace("!", "") if before.tail == "," else before.tail
    return [*rest[:-1], _Chunk(before.body, ending)]


def _end(chunks: Sequence[_Chunk]) -> None:
    """Drops the last sign: `?` where the words themselves ask, `.` where they do not. Not `!`, which may be part of
    what is asked about, and nothing where a question is about signs."""
    last = chunks[-1]
    whole = not _OPERATORS.search(last.body) or _NUMERIC.fullmatch(last.body) is not None
    about_signs = not lex.ABOUT_SIGNS.isdisjoint(chunk.lower for chunk in chunks)
    if last.tail and whole and not about_signs and last.tail in _needless(chunks):
        last.tail = ""


def _needless(chunks: Sequence[_Chunk]) -> str:
    """The signs that say no more than the words: a question mark after what is a question by its words."""
    if _fronted(chunks):
        return "?"
    words = [chunk.lower for chunk in chunks]
    while words and (words[0] in lex.GREETINGS or words[0] in ("please", "there")):
        words = words[1:]
    first, second = (*words, "", "")[:2]
    if (first, second) == ("tell", "me") or (first in ("can", "could", "would", "will") and second == "you"):
        return "?."
    asks = first in lex.ASKING or first.removesuffix("n't") in lex.ASKING or first.removesuffix("'s") in lex.QUESTIONS
    if first in ("do", "have", "may", "will"):  # which also give orders, or are names
        asks = second in lex.SUBJECTS or (first == "do" and second.endswith("s") and second not in lex.OBJECTS)
    return "?" if asks else "."


def _fronted(chunks: Sequence[_Chunk]) -> bool:
    """Whether it is `in France, what do people eat`."""
    found = _FRONTED.fullmatch(" ".join(chunk.body + chunk.tail for chunk in chunks))
    return found is not None and found[1].lower() in lex.ASKING


def _opens(before: Sequence[_Chunk]) -> bool:
    """Whether a sentence begins here."""
    if not before:
        return True
    greeted = before[-1].lower in lex.GREETINGS or (before[-1].lower == "there" and len(before) == 2)
    return before[-1].tail in (".", "?", "!") if before[-1].tail != "," else greeted and len(before) <= 2


def _is_name(chunk: _Chunk, word: str | None, opening: bool) -> bool:
    if word is not None and word.removesuffix("'s") in lex.NAMES:
        return True
    written = _WORD.fullmatch(chunk.body) is not None and chunk.body[0].isupper()
    return written and not opening and word != "i" and not chunk.body.startswith("I'")


def _folded_word(
    body: str, opening: bool, fronts: bool, before: Sequence[_Chunk], after: Sequence[_Chunk]
) -> str | None:
    """The word in the one case that all its spellings share, itself where case matters, None where it is verbatim."""
    if _KEPT.fullmatch(body) or _NUMERIC.fullmatch(body):
        return body
    if not _WORD.fullmatch(body):
        return None
    lower = body.lower()
    if body == lower:
        return body
    following = after[0].body if after else ""
    if _pronoun(body, before, following) or body in lex.SPELLED:
        return lower
    if body != lower[0].upper() + lower[1:] or not body.isascii():
        return body
    named = lower.removesuffix("'s") in lex.NAMES and not (before and before[-1].body in lex.ARTICLES)
    starts = opening and (fronts or _begins(lower, following))
    return lower if named or starts else body


def _pronoun(body: str, before: Sequence[_Chunk], following: str) -> bool:
    """Whether `I` is who asks, and not a letter, a numeral or a current."""
    if body in ("I'm", "I've", "I'll", "I'd"):
        return True
    if body != "I" or not _WORD.fullmatch(following) or following.lower() in lex.AFTER_LETTERS:
        return False
    if following.endswith("s") and not following.endswith("ss") and following not in lex.PRONOUN_S:
        return False  # `if I flows`
    return not before or bool(before[-1].tail) or before[-1].body in lex.BEFORE_PRONOUN


def _begins(lower: str, following: str) -> bool:
    """Whether this word, at the head of a sentence, has its capital from there alone."""
    if lower == "a":  # also a letter, a note and a grade
        return following in lex.COMMON
    if lower in lex.SHORT_OPENERS:  # In, As, At, He are chemical elements, May and Will are names
        return following.lower() in lex.SUBJECTS or following.lower() in lex.NAMES or bool(_YEAR.fullmatch(following))
    return lower in lex.OPENERS or lower in lex.CONTRACTIONS or lower.removesuffix("n't") in lex.ASKING
