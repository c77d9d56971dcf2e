"""Whether two questions may share an answer, by their words alone. Near vectors have the same topic; these
rules decide whether they ask the same.

`veto` names the rule that forbids it; `strictly_equal` is the only thing that permits it without further evidence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from cache.semantic import lexicon as lex
from cache.semantic.canonical import Canonical, canonical

_PLAIN = re.compile(r"[a-z0-9][a-z0-9_.'-]*")  # in ASCII
_PAUSES = frozenset(",;:.")  # after plain words; between other words they decide nothing


def strictly_equal(one: str, other: str) -> bool:
    """The same words in the same order, once spelling and courtesies are taken off; the same signs, and the same case
    of every word whose case can matter."""
    a, b = canonical(one), canonical(other)
    if a.words != b.words or not a.words or not a.letters:
        return False
    return all(not (x and y) or x == y for x, y in zip(a.articles, b.articles, strict=True))


def veto(one: str, other: str) -> str:
    """The name of the first rule that tells the two apart, empty where none does."""
    a, b = canonical(one), canonical(other)
    if a.words == b.words:  # no rule could tell them apart
        return ""
    return next((name for name, differ in RULES if differ(a, b)), "")


def fleeting(text: str) -> bool:
    """Whether the answer changes with time, so that a stored one is outdated at once."""
    return canonical(text).fleeting


def _base(word: str) -> str:
    """Without the s of a plural; equal words have equal bases."""
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def _tally(words: Canonical, of: frozenset[str]) -> Counter[str]:
    return Counter(base for word in words.words if (base := word if word in of else _base(word)) in of)


def _numbers(a: Canonical, b: Canonical) -> bool:
    def found(c: Canonical) -> list[str]:
        return sorted(w for w in c.words if w[0].isdigit() or w in lex.MAGNITUDES)

    return found(a) != found(b)


def _form(a: Canonical, b: Canonical) -> bool:
    """Case, signs, blanks or accents are all that tells the two apart."""
    return a.letters == b.letters and a.words != b.words


def _signs(a: Canonical, b: Canonical) -> bool:
    """Words that no rule reads, and those whose case matters, must be the same in the same order."""

    def found(c: Canonical) -> list[str]:
        return [w for w in c.words if not _PLAIN.fullmatch(w) and w not in _PAUSES]

    return found(a) != found(b)


def _units(a: Canonical, b: Canonical) -> bool:
    return _tally(a, lex.UNITS) != _tally(b, lex.UNITS)


def _dates(a: Canonical, b: Canonical) -> bool:
    return _tally(a, lex.DATES) != _tally(b, lex.DATES)


def _tense(a: Canonical, b: Canonical) -> bool:
    return any((word in a.words) != (word in b.words) for word in ("was", "did", "will", "had"))


def _negation(a: Canonical, b: Canonical) -> bool:
    if sum(_tally(a, lex.NEGATORS).values()) != sum(_tally(b, lex.NEGATORS).values()):
        return True
    here, there = set(a.words) - set(b.words), set(b.words) - set(a.words)
    return any(prefix + word in there for prefix in lex.NEGATING_PREFIXES for word in here) or any(
        prefix + word in here for prefix in lex.NEGATING_PREFIXES for word in there
    )


def _polarity(a: Canonical, b: Canonical) -> bool:
    here = {form for word in set(a.words) - set(b.words) for form in (word, _base(word))}
    there = {form for word in set(b.words) - set(a.words) for form in (word, _base(word))}
    return any((x in here and y in there) or (y in here and x in there) for x, y in lex.OPPOSITES)


def _direction(a: Canonical, b: Canonical) -> bool:
    def legs(c: Canonical) -> Counter[tuple[str, str]]:
        pairs = zip(c.words, (*c.words, "")[1:], strict=True)
        return Counter((word, after) for word, after in pairs if word in lex.DIRECTIONS)

    def ways(c: Canonical) -> Counter[str]:
        return _tally(c, lex.DIRECTIONS)

    one, other = legs(a), legs(b)
    moved = {word for word, _ in one - other} & {word for word, _ in other - one}
    return bool(moved) or ways(a) != ways(b)


def _question(a: Canonical, b: Canonical) -> bool:
    def asked(c: Canonical) -> tuple[str, ...]:
        words = c.words
        for at, word in enumerate(words):
            if word == "how" and at + 1 < len(words) and words[at + 1] in lex.MEASURES:
                return word, words[at + 1]
            if word in lex.QUESTIONS or word == "howto":
                return (word,)
        return ()

    return asked(a) != asked(b)


def _quantifiers(a: Canonical, b: Canonical) -> bool:
    return _tally(a, lex.QUANTIFIERS) != _tally(b, lex.QUANTIFIERS)


def _entity(a: Canonical, b: Canonical) -> bool:
    here, there = ({_base(word.lower().removesuffix("'s")) for word in c.words} for c in (a, b))
    return any(_base(name) not in there for name in a.names if _base(name) in here) or any(
        _base(name) not in here for name in b.names if _base(name) in there
    )


def _content(c: Canonical) -> list[str]:
    return [_base(word) for word in c.words if word not in lex.FUNCTION and word not in lex.DIRECTIONS]


def _order(a: Canonical, b: Canonical) -> bool:
    one, other = _content(a), _content(b)
    shared = set(one) & set(other)
    return [w for w in one if w in shared] != [w for w in other if w in shared]


RULES: tuple[tuple[str, Callable[[Canonical, Canonical], bool]], ...] = (
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
