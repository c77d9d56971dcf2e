"""Decides by words alone whether two questions may share an answer: near vectors have the same topic, and these rules
decide whether they ask the same.

`veto` names the rule that forbids it; `strictly_equal` alone permits it without further evidence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from cache.semantic import lexicon as lex
from cache.semantic.words import Words, words_of

_ENGLISH = re.compile(r"[a-z]+")
_PLAIN = re.compile(r"[a-z0-9][a-z0-9_.'’-]*")  # a word of ASCII alone


def strictly_equal(one: str, other: str) -> bool:
    """Compares words as `words` normalizes them, in their order."""
    a = words_of(one)
    return bool(a.letters) and a.words == words_of(other).words


def veto(one: str, other: str) -> str:
    """The first rule that separates the two, empty where none does."""
    a, b = words_of(one), words_of(other)
    if a.words == b.words:  # no rule could tell them apart
        return ""
    return next((name for name, differ in RULES if differ(a, b)), "")


def fleeting(text: str) -> bool:
    """Whether the answer changes with time, so that a stored one is outdated at once."""
    return not lex.FLEETING.isdisjoint(_ENGLISH.findall(text.lower()))


def _base(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def _lower(question: Words) -> list[str]:
    return [word.lower().replace("’", "'") for word in question.bare]


def _tally(question: Words, of: frozenset[str]) -> Counter[str]:
    return Counter(base for word in _lower(question) if (base := word if word in of else _base(word)) in of)


def _numbers(a: Words, b: Words) -> bool:
    def found(c: Words) -> list[str]:
        words = [lex.NUMBERS.get(word, word) for word in _lower(c)]
        return sorted(word for word in words if any(map(str.isdigit, word)) or word in lex.MAGNITUDES)

    return found(a) != found(b)


def _form(a: Words, b: Words) -> bool:
    return a.letters == b.letters


def _signs(a: Words, b: Words) -> bool:
    """Whether words that no rule reads, and those whose case matters, differ or stand in another order."""

    def found(c: Words) -> list[str]:
        return [word for word in c.bare if not _PLAIN.fullmatch(word)]

    return found(a) != found(b)


def _units(a: Words, b: Words) -> bool:
    return _tally(a, lex.UNITS) != _tally(b, lex.UNITS)


def _dates(a: Words, b: Words) -> bool:
    return _tally(a, lex.DATES) != _tally(b, lex.DATES)


def _tense(a: Words, b: Words) -> bool:
    here, there = set(_lower(a)), set(_lower(b))
    return any((word in here) != (word in there) for word in ("was", "were", "did", "will", "had"))


def _negation(a: Words, b: Words) -> bool:
    def count(c: Words) -> int:
        return sum(word in lex.NEGATORS or word.endswith("n't") for word in _lower(c))

    if count(a) != count(b):
        return True
    here, there = set(_lower(a)) - set(_lower(b)), set(_lower(b)) - set(_lower(a))
    return any(prefix + word in there for prefix in lex.NEGATING_PREFIXES for word in here) or any(
        prefix + word in here for prefix in lex.NEGATING_PREFIXES for word in there
    )


def _polarity(a: Words, b: Words) -> bool:
    one, other = set(_lower(a)), set(_lower(b))
    here = {form for word in one - other for form in (word, _base(word))}
    there = {form for word in other - one for form in (word, _base(word))}
    return any((x in here and y in there) or (y in here and x in there) for x, y in lex.OPPOSITES)


def _direction(a: Words, b: Words) -> bool:
    def legs(c: Words) -> Counter[tuple[str, str]]:
        words = [word for word in _lower(c) if word not in lex.ARTICLES]
        return Counter((word, after) for word, after in pairwise([*words, ""]) if word in lex.DIRECTIONS)

    one, other = legs(a), legs(b)
    moved = {word for word, _ in one - other} & {word for word, _ in other - one}
    return bool(moved) or _tally(a, lex.DIRECTIONS) != _tally(b, lex.DIRECTIONS)


def _question(a: Words, b: Words) -> bool:
    def asked(c: Words) -> tuple[str, ...]:
        for word, after in pairwise([*(word.removesuffix("'s") for word in _lower(c)), ""]):
            if word == "how" and after in lex.MEASURES:
                return word, after
            if word in lex.QUESTIONS:
                return ("what" if word == "which" else word,)
        return ()

    return asked(a) != asked(b)


def _quantifiers(a: Words, b: Words) -> bool:
    return _tally(a, lex.QUANTIFIERS) != _tally(b, lex.QUANTIFIERS)


def _entity(a: Words, b: Words) -> bool:
    def names(c: Words) -> set[str]:
        named = (word for word in c.bare[1:] if word[0].isupper() or word.removesuffix("'s") in lex.NAMES)
        return {_base(word.lower().removesuffix("'s")) for word in named} - {"i"}

    here, there = ({_base(word.removesuffix("'s")) for word in _lower(c)} for c in (a, b))
    return not names(a) <= there or not names(b) <= here


def _content(c: Words) -> list[str]:
    return [_base(word) for word in _lower(c) if word not in lex.FUNCTION and word not in lex.DIRECTIONS]


def _order(a: Words, b: Words) -> bool:
    one, other = _content(a), _content(b)
    shared = set(one) & set(other)
    return [w for w in one if w in shared] != [w for w in other if w in shared]


RULES: tuple[tuple[str, Callable[[Words, Words], bool]], ...] = (
    ("numbers", _numbers),
    ("units", _units),
    ("dates", _dates),
    ("tense", _tense),
    ("negation", _negation),
    ("polarity", _polarity),
    ("direction", _direction),
    ("question", _question),
    ("quantifiers", _quantifiers),
    ("entity", _entity),
    ("order", _order),
    ("form", _form),
    ("signs", _signs),
)
