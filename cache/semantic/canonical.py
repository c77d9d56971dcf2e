"""The words of a question, in the one form that all its rewordings share: spelling, contractions, numbers, units,
dates, courtesies and the usual ways of asking. What is left must be equal, in order, for two questions to be equal.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache

from cache.semantic import lexicon as lex
from cache.semantic.folding import folded

_TOKEN = re.compile(
    r"\x00\d+\x00|\d+(?:,\d{3})+(?:\.\d+)?|\d*(?:\.\d+)+|\d+(?:st|nd|rd|th)\b|\d+[^\W\d_]\w*|\d+|[^\W\d_][\w'-]*|[^\w\s]"
)
_ENGLISH = re.compile(r"[a-z]+")
# "5km" is two words; "5g", "4k" and "80s" are not.
_GLUED = re.compile(
    r"\b(\d+(?:\.\d+)?)("
    + "|".join(sorted((a for a in lex.ABBREVIATIONS if len(a) > 1), key=len, reverse=True))
    + r")\b"
)

_POLITE = re.compile(
    r"^(?:(?:hi|hello|hey)(?: there)? ?[,!.] ?|(?:please|kindly)[ ,]+|(?:can|could|would|will) you (?:please|kindly) "
    r"|(?:can|could|would|will) you (?=(?:tell|give|show|explain|list|name|write|recommend|convert|translate|count|copy"
    r"|describe|suggest|summarize|compare|define|calculate)\b)"
    r"|(?:i want|i would like|i'd like) to know "
    r"|(?:do you know|help me understand) (?=(?:what|who|where|when|why|how)\b))+"
)
_LISTING = re.compile(
    r"^(?:give me|name|list) "
    r"(?=(?:\d|(?:one|two|three|four|five|six|seven|eight|nine|ten|some|several|all|every|any|examples)\b))"
)
_HOWTO = re.compile(r"^how (?:do i|can i|could i|would i|to|can one|does one|is the way to)\b")
_FRONTED = re.compile(
    r"^((?:in|at|for|on|during|with|when|if|as|after|before) [^,?!.;:]{1,80}), ?"
    r"((?:what|who|where|when|why|how|which|is|are|do|does|did|can|should|would|will)\b[^,;:.?!]*)$"
)
_ROUTE = re.compile(r"\bto (\x00\d+\x00|[^\W\d_]+) from (\x00\d+\x00|[^\W\d_]+)$")
_ASIDE = re.compile(r"^((?:what|who|where|when|why|how|which)\b[^,;:.?!]*), ((?:in|at|for|on|during|with) [^,;:.?!]*)$")
_CLOCK = re.compile(r"\b((?:at|by|until|till|from|to|before|after|around) (?:1[0-2]|[1-9])) ?(AM|PM)\b")


@dataclass(frozen=True, slots=True)
class Canonical:
    """A question, reworded."""

    words: tuple[str, ...]  # articles left out
    articles: tuple[str, ...]  # before each word: "a", "the" or ""
    names: frozenset[str]  # words written as names, in lower case
    letters: str  # the whole text without case, signs, blanks and accents
    fleeting: bool  # whether it asks for what changes with time


@lru_cache(maxsize=4096)
def canonical(text: str) -> Canonical:
    """The shared form. Pure; memoized."""
    plain = unicodedata.normalize("NFC", text).replace("’", "'").replace("‘", "'").strip()
    letters = _letters(plain)
    passing = not lex.FLEETING.isdisjoint(_ENGLISH.findall(plain.lower()))
    if len(plain.splitlines()) > 1 or "\x00" in plain or "`" in plain:  # code or verse: no rewording of it is known
        return Canonical((text,), ("",), frozenset(), letters, passing)
    found = folded(plain)
    kept: list[str] = []
    articles: list[str] = []
    article = ""
    for word in _rewritten(found.text):
        if word in lex.ARTICLES:
            article = "the" if word == "the" else "a"
            continue
        kept.append(found.restored(word))
        articles.append(article)
        article = ""
    return Canonical(tuple(kept), tuple(articles), found.names, letters, passing)


def _letters(plain: str) -> str:
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKD", plain).casefold()))


def _rewritten(text: str) -> list[str]:
    text = _POLITE.sub("", text)
    text = re.sub(r"^(?:please )?tell me (?=the\b)", "what is ", text)
    text = re.sub(r"^(?:please )?tell me:? (?=(?:what|who|where|when|why|how|which)\b)", "", text)
    text = _LISTING.sub("list ", text)
    text = re.sub(r"^show me ", "show ", text)
    text = re.sub(r"^(explain .*?) to me$", r"\1", text)
    text = " ".join(_expanded(word) for word in text.split(" "))
    if fronted := _FRONTED.match(text):
        text = f"{fronted[2]} {fronted[1]}"
    text = _ASIDE.sub(r"\1 \2", text)
    text = _HOWTO.sub("howto", text.replace("what is the way to", "how is the way to"))
    text = _ROUTE.sub(r"from \2 to \1", text)
    text = re.sub(r"\ba (few|little|lot)\b", r"a_\1", text)
    text = re.sub(r"\bat (least|most)\b", r"at_\1", text)
    text = re.sub(r"\blots of\b", "a_lot of", text)
    text = re.sub(r"(?<!\S)([$€£¥₹])(\d[\d,.]*\d|\d)", r"\2 \1", text)
    text = re.sub(r"(?:° ?|\bdegrees? )(?:C|celsius|centigrade)\b", " celsius", text)
    text = re.sub(r"(?:° ?|\bdegrees? )(?:F|fahrenheit)\b", " fahrenheit", text)
    text = _CLOCK.sub(lambda found: f"{found[1]} {found[2].lower()}", text)
    text = _GLUED.sub(r"\1 \2", text)
    text = re.sub(r"\b(?:km/h|kmh|kph)(?= |[?.!,;:]|$)", "kilometers per hour", text)
    return _dated(_spelled(_TOKEN.findall(text)))


def _expanded(word: str) -> str:
    bare = word.rstrip(".,?!;:")
    tail = word[len(bare) :]
    if bare in lex.CONTRACTIONS:
        return lex.CONTRACTIONS[bare] + tail
    if bare.endswith("n't") and len(bare) > 3:
        return f"{bare[:-3]} not{tail}"
    return word


def _spelled(tokens: list[str]) -> list[str]:
    words: list[str] = []
    for token in tokens:
        after_number = bool(words) and words[-1][0].isdigit()
        if token[0].isdigit():
            token = token.replace(",", "")
        elif after_number and token in lex.ABBREVIATIONS:
            words.extend(lex.ABBREVIATIONS[token].split())
            continue
        token = lex.SYMBOLS.get(token, token)
        token = lex.SPELLINGS.get(token, token)
        token = lex.NUMBERS.get(token, token)
        words.append(lex.SAME.get(token, token))
    return _inverted(words)


def _inverted(words: list[str]) -> list[str]:
    """Takes off what says only that a question is one, and brings a lone `not` to the end: "why can I not", "why
    can't I". The first `do` helps a verb; a second one is a verb."""
    if not words or words[0] not in lex.QUESTIONS:
        return ["do", *words[1:]] if words and words[0] == "does" else words
    helped = 2 if len(words) > 2 and words[1] in ("do", "does") else 1
    words = [words[0], *(word for word in words[helped:] if word != "is")]
    if words.count("not") == 1 and lex.SCOPES.isdisjoint(words):
        words = [*(word for word in words if word != "not"), "not"]
    return words


def _dated(words: list[str]) -> list[str]:
    """`may 12, 1969` as `12 may 1969`."""
    for at, word in enumerate(words):
        month = word.lower()
        if month not in lex.MONTHS:
            continue
        if at and re.fullmatch(r"[0-9]{1,2}(?:st|nd|rd|th)?", words[at - 1]):
            return [*words[:at], month, *words[at + 1 :]]
        day = re.sub(r"(?<=[0-9])(?:st|nd|rd|th)$", "", "".join(words[at + 1 : at + 2]))
        if re.fullmatch(r"[0-9]{1,2}", day):
            rest = words[at + 2 :]
            comma = rest[:1] == [","] and re.fullmatch(r"[0-9]{4}", "".join(rest[1:2]))
            return [*words[:at], day, month, *(rest[1:] if comma else rest)]
    return words
