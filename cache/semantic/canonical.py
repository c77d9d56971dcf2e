"""The words of a question, in the one form that all its rewordings share: spelling, contractions, numbers, units,
dates, courtesies and the usual ways of asking. What is left must be equal, in order, for two questions to be equal.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache

from cache.semantic import lexicon as lex

_TOKEN = re.compile(
    r"\x00\d+\x00|\d+(?:,\d{3})+(?:\.\d+)?|\d*(?:\.\d+)+|\d+(?:st|nd|rd|th)\b|\d+[^\W\d_]\w*|\d+!?|[^\W\d_][\w'-]*|_+|[^\w\s]"
)
_QUOTED = re.compile(r'"([^"]*)"|“([^”]*)”')
_ENDS = ".,?!;:\"'()"
_DROPPED = frozenset(".,?!;:\"'“”„")
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
_FAREWELL = re.compile(r" ?[,.!?]+ ?(?:please|thanks|thank you)[ .!?]*$")
_LISTING = re.compile(
    r"^(?:give me|name|list) "
    r"(?=(?:\d|(?:one|two|three|four|five|six|seven|eight|nine|ten|some|several|all|every|any|examples)\b))"
)
_HOWTO = re.compile(r"^how (?:do i|can i|could i|would i|to|can one|does one|is the way to)\b")
_FRONTED = re.compile(
    r"^((?:in|at|for|on|during|with|when|if|as|after|before) [^,?!.;:]{1,80}), ?"
    r"((?:what|who|where|when|why|how|which|is|are|do|does|did|can|should|would|will)\b[^,;:]*?)[?.! ]*$"
)
_ROUTE = re.compile(r"\bto ([^\W\d_]+) from ([^\W\d_]+)(?=[?.! ]*$)")


@dataclass(frozen=True, slots=True)
class Canonical:
    """A question, reworded."""

    words: tuple[str, ...]  # articles left out
    articles: tuple[str, ...]  # before each word: "a", "the" or ""
    names: frozenset[str]  # words written with a capital inside the sentence, in lower case


@lru_cache(maxsize=4096)
def canonical(text: str) -> Canonical:
    """The shared form. Pure; memoized."""
    plain = unicodedata.normalize("NFKC", text).replace("’", "'").replace("‘", "'").strip()
    if "\n" in plain or "\x00" in plain or "`" in plain:  # code or verse, whose rewordings are not known here
        return Canonical((text,), ("",), frozenset())
    names = _names(plain)
    quoted = tuple(a or b for a, b in _QUOTED.findall(plain))
    places = iter(range(len(quoted)))
    words = _rewritten(_marked(_QUOTED.sub(lambda _: f"\x00{next(places)}\x00", plain)))
    words = [f'"{quoted[int(word[1:-1])]}"' if word[0] == "\x00" else word for word in words]
    kept: list[str] = []
    articles: list[str] = []
    article = ""
    for word in words:
        if word in lex.ARTICLES:
            article = "the" if word == "the" else "a"
            continue
        kept.append(word)
        articles.append(article)
        article = ""
    return Canonical(tuple(kept), tuple(articles), names)


def _marked(text: str) -> str:
    """Marks words that mean something else in lower case: US, Turkey."""
    if text.upper() == text:
        return text
    first, *rest = text.split() or [""]
    shouted = first.strip(_ENDS) in lex.ACRONYMS - {"A"}
    return " ".join((_mark(first) if shouted else first, *(_mark(word) for word in rest)))


def _mark(word: str) -> str:
    bare = word.strip(_ENDS)
    special = bare in lex.ACRONYMS or (bare[:1].isupper() and bare.lower() in lex.NAMESAKES)
    return word.replace(bare, f"{bare.lower()}_name", 1) if special else word


def _names(text: str) -> frozenset[str]:
    found = set()
    for sentence in re.split(r"[.?!:]\s+", text):
        for word in _TOKEN.findall(sentence)[1:]:
            if word[0].isupper() and word != "I" and not word.startswith("I'"):
                found.add(word.lower().removesuffix("'s"))
    return frozenset(found)


def _rewritten(text: str) -> list[str]:
    text = re.sub(r"\s+", " ", text.lower())
    text = _FAREWELL.sub("", text)
    text = _POLITE.sub("", text)
    text = re.sub(r"^(?:please )?tell me (?=the\b)", "what is ", text)
    text = re.sub(r"^(?:please )?tell me:? (?=(?:what|who|where|when|why|how|which)\b)", "", text)
    text = _LISTING.sub("list ", text)
    text = re.sub(r"^show me ", "show ", text)
    text = re.sub(r"^(explain .*?) to me[?.! ]*$", r"\1", text)
    text = " ".join(_expanded(word) for word in text.split(" "))
    if fronted := _FRONTED.match(text):
        text = f"{fronted[2]} {fronted[1]}"
    text = _HOWTO.sub("howto", text.replace("what is the way to", "how is the way to"))
    text = _ROUTE.sub(r"from \2 to \1", text)
    text = re.sub(r"\ba (few|little|lot)\b", r"a_\1", text)
    text = re.sub(r"\bat (least|most)\b", r"at_\1", text)
    text = re.sub(r"\blots of\b", "a_lot of", text)
    text = re.sub(r"([$€£¥₹]) ?(\d[\d,.]*\d|\d)", r"\2 \1", text)
    text = re.sub(r"(?:°|\bdegrees?) ?(celsius|fahrenheit|centigrade|c|f)\b", r" \1", text)
    text = _GLUED.sub(r"\1 \2", text)
    text = re.sub(r"\b(?:km/h|kmh|kph)(?= |[?.!,]|$)", "kilometers per hour", text)
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
        if token in _DROPPED:
            continue
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
    """`may 12` as `12 may`."""
    for at in range(len(words) - 1):
        month, day = words[at], re.sub(r"(?<=\d)(?:st|nd|rd|th)$", "", words[at + 1])
        written_after = at and re.fullmatch(r"\d{1,2}", words[at - 1])
        if month in lex.MONTHS and re.fullmatch(r"\d{1,2}", day) and not written_after:
            return [*words[:at], day, month, *words[at + 2 :]]
    return words
