"""The guard on its suites, each in two halves: the rules were written beside `tuning` and never beside `held_out`.

`pairs_*`: 300 pairs of ten kinds, half of which mean the same. `signs_*`: pairs that differ by case, signs or accents
alone, and ask different things. `ordinary_*`: pairs that differ by case or signs alone, as people write them, and ask
the same.
"""

from __future__ import annotations

import json
import time
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.semantic.embedder import ModelEmbedder
from cache.semantic.guard import RULES, fleeting, strictly_equal, veto
from cache.semantic.observations import difference
from cache.semantic.words import words_of

DATA = Path(__file__).parent / "data"
HALVES = ("tuning", "held_out")


def pairs(half: str, suite: str = "pairs") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{suite}_{half}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("half", HALVES)
def test_the_suite_is_what_it_says(half: str) -> None:
    rows = pairs(half)
    kinds = Counter((row["kind"], row["same"]) for row in rows)
    assert len(kinds) == 20
    assert set(kinds.values()) == {15}
    assert len({(row["a"], row["b"]) for row in rows}) == 300
    assert all(row["a"] != row["b"] for row in rows)


def test_the_halves_share_nothing_but_a_few_paraphrases() -> None:
    one, other = ({(row["a"], row["b"]) for row in pairs(half)} for half in HALVES)
    assert not one & other


@pytest.mark.parametrize("half", HALVES)
def test_none_is_served_wrongly_where_cosine_alone_serves_many(half: str, embedder: ModelEmbedder) -> None:
    served: Counter[tuple[str, bool]] = Counter()
    for row in pairs(half):
        near = float(embedder.embed(row["a"]) @ embedder.embed(row["b"]))
        passed = not veto(row["a"], row["b"])
        served["cosine", row["same"]] += near >= 0.90
        served["strict", row["same"]] += near >= 0.80 and passed and strictly_equal(row["a"], row["b"])
    assert served["strict", False] == 0
    assert served["cosine", False] >= 45  # the suite is adversarial: nearness alone serves a third and more
    assert served["strict", True] >= 4  # of which most are reworded: they need evidence


def written(text: str) -> str:
    """What is left without case, signs, blanks and accents."""
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKD", text).casefold()))


def test_the_suite_of_signs_is_what_it_says() -> None:
    halves = [{frozenset((row["a"], row["b"])) for row in pairs(half, "signs")} for half in HALVES]
    assert [len(half) for half in halves] == [274, 264]
    assert len(halves[0] | halves[1]) > 470
    rows = pairs("tuning", "signs") + pairs("held_out", "signs")
    assert [row for row in rows if row["a"] == row["b"]] == []
    assert sum(written(row["a"]) != written(row["b"]) for row in rows) <= 11  # `%05d`, `ħ`: one character more or like


@pytest.mark.parametrize("half", HALVES)
def test_what_differs_by_case_or_sign_alone_is_never_served(half: str) -> None:
    """Neither as equal nor, since it is vetoed, by any evidence. The vectors play no part in it."""
    ways = [(row["a"], row["b"]) for row in pairs(half, "signs")]
    ways += [(other, one) for one, other in ways]
    assert [way for way in ways if strictly_equal(*way)] == []
    assert [way for way in ways if not veto(*way)] == []


def test_near_misses_by_words_are_never_served() -> None:
    """Articles, small words, words that are mentioned, a `not` that moves, names: written without knowing the rules."""
    rows = [json.loads(line) for line in (DATA / "near_misses_by_words.jsonl").read_text().splitlines()]
    ways = [(row["a"], row["b"]) for row in rows] + [(row["b"], row["a"]) for row in rows]
    assert len(rows) >= 300
    assert [way for way in ways if strictly_equal(*way)] == []


def test_pairs_that_differ_by_spelling_and_courtesy_are_served() -> None:
    """As many as before words counted."""
    rows = [json.loads(line) for line in (DATA / "safe_by_spelling.jsonl").read_text().splitlines()]
    assert len(rows) >= 60
    assert sum(strictly_equal(row["a"], row["b"]) for row in rows) >= 50


@pytest.mark.parametrize(("half", "least"), [("tuning", 49), ("held_out", 31)])
def test_ordinary_ways_of_writing_are_still_equal(half: str, least: int) -> None:
    rows = pairs(half, "ordinary")
    assert len(rows) == {"tuning": 60, "held_out": 40}[half]
    served = [row for row in rows if strictly_equal(row["a"], row["b"]) and strictly_equal(row["b"], row["a"])]
    assert len(served) >= least


ALIKE = [
    ("How do I cook rice?", "how do i cook rice"),
    ("How do  I cook   rice?", "How do I cook rice?"),
    (" How do I cook rice? \n", "How do I cook rice?"),
    ("What is the capital of Peru?", "What is  the capital of Peru?"),
    ("What is the capital of Peru?", "Whats the capital of Peru?"),
    ("What is the capital of Peru?", "What is the capital of Peru ?"),
    ("What is the capital of Peru?", "Please, what is the capital of Peru?"),
    ("What's the capital of Peru?", "Whats the capital of Peru?"),
    ("What's the capital of Peru?", "What’s the capital of Peru"),
    ("What's the capital of Peru?", "what is the capital of Peru?"),
    ("What's up with him?", "Whats up with him?"),
    ("Why can't I sleep?", "why cannot I sleep"),
    ("Why dont cats swim?", "Why don't cats swim?"),
    ("Please explain recursion", "Explain recursion."),
    ("Could you please explain recursion?", "explain recursion"),
    ("Hi, who invented the wheel?", "Who invented the wheel?"),
    ("Who invented the wheel, please?", "who invented the wheel"),
    ("Who invented the wheel? Thanks!", "who invented the wheel"),
    ("Who invented the wheel, thank you", "who invented the wheel"),
    ("Can bees see red?", "can bees see red"),
    ("Will it rain?", "will it rain"),
    ("Is London in England?", "is london in england?"),
    ("It does not work. Why is that?", "It does not work. why is that"),
    ("How far is the moon?", "how far is the moon"),
    ("I need a new lamp.", "i need a new lamp"),
    ("The lamp is broken", "the lamp is broken"),
]
# By the five holes that there were, and others of their kind.
NEAR = [
    ("What is iron?", "What is an iron?"),
    ("Describe light", "Describe a light"),
    ("Who is the president?", "Who is president?"),
    ("What does he like?", "What is he like?"),
    ("Why do we be?", "Why are we?"),
    ("Where do you be?", "Where you be?"),
    ("How do I use begin in Ruby?", "How do I use start in Ruby?"),
    ("What rhymes with large?", "What rhymes with big?"),
    ("How do you spell colour?", "How do you spell color?"),
    ("What does grey mean?", "What does gray mean?"),
    ("How do you say film in German?", "How do you say movie in German?"),
    ("Translate what's the matter", "Translate what is the matter"),
    ("Is dont a word?", "Is don't a word?"),
    ("What should I do not to fail?", "What should I not do to fail?"),
    ("Why did he not say that?", "Why did he say not that?"),
    ("Can I not go?", "Can't I go?"),
    ("Who is hamlet?", "Who is Hamlet?"),
    ("How do I polish shoes?", "How do I Polish shoes?"),
    ("will is tall", "Will is tall"),
    ("Is in a metal?", "Is In a metal?"),
    ("How does it work?", "How does IT work?"),
    ("Is 10 000 right?", "Is 10\u00a0000 right?"),
    ("What is\u00a0this?", "What is this?"),
    ("What is\tthis?", "What is this?"),
    ('Who says "a  b"?', 'Who says "a b"?'),
    ("How many letters has a  b?", "How many letters has a b?"),
    ("What does print a  b do in python?", "What does print a b do in python?"),
    ("How nice you are", "How nice you are?"),
    ("Who's left?", "Who is left?"),
    ("What's he done?", "What is he done?"),
    ("Please the king", "the king"),
    ("Please, the king", "the king"),
    ("Please, how nice you are", "how nice you are"),
    ("What does a ? b mean ?", "What does a ? b mean?"),
    ("What does print a ?", "What does print a?"),
    ("Why is the sky blue ?!", "Why is the sky blue?"),
    ("Say hello, please", "Say hello"),
    ("Say hello. Thanks!", "Say hello."),
    ("Whom did it please?", "Whom did it?"),
    ("Why did he thank you?", "Why did he?"),
    ("Can i and j be equal?", "Can I and j be equal?"),
    ("Ask Dr. Who is there", "Ask Dr. who is there"),
    ("What is resume?", "What is résumé?"),
    ("What is 5 km?", "What is 5km?"),
    ("What is 1,000?", "What is 1000?"),
    ("Name three towns", "Name 3 towns"),
]
APART = [
    ("What does a lawyer do?", "What is a lawyer?"),
    ("Will you die?", "Can you die?"),
    ("how do you say thank you", "how do you say please"),
    ("hello world program", "world program"),
    ("take .5 mg", "take 5 mg"),
    ("What is 5!", "What is 5"),
    ("What is turkey?", "What is Turkey?"),
    ("Is 5G safe?", "Is 5 g safe?"),
    ("Can I not pay?", "Can't I pay?"),
    ("Do bees sleep?", "Bees sleep."),
    ('Print "Hello"', 'Print "hello"'),
    ("US population", "us population"),
    ("What should I do not to fail?", "What should I not do to fail?"),
    ("What is a president?", "What is the president?"),
    ("if x:\n  y", "if x:\n y"),
    ("Does A imply B?", "Does B imply A?"),
    ("-5 + 3", "5 + 3"),
    ("few people came", "a few people came"),
    ("Who is the president?", "Who was the president?"),
    ("3.10 or 3.1", "3.1 or 3.10"),
    ("x^2", "x*2"),
    ("Run `ls -l`", "run `ls -L`"),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_rewordings_are_equal(one: str, other: str) -> None:
    assert strictly_equal(one, other)
    assert strictly_equal(other, one)


@pytest.mark.parametrize("nothing", ["", " ", "...", "?!"])
def test_questions_without_words_equal_nothing(nothing: str) -> None:
    assert not strictly_equal(nothing, nothing)
    assert not strictly_equal(nothing, "?")


@pytest.mark.parametrize(("one", "other"), APART + NEAR)
def test_traps_are_not(one: str, other: str) -> None:
    assert not strictly_equal(one, other)
    assert not strictly_equal(other, one)


@pytest.mark.parametrize(
    ("rule", "one", "other"),
    [
        ("numbers", "give me 3 ideas", "give me 5 ideas"),
        ("units", "is 5 kg heavy", "is 5 pounds heavy"),
        ("dates", "open on monday", "open on friday"),
        ("tense", "who is king", "who was king"),
        ("negation", "is it legal", "is it illegal"),
        ("polarity", "enable dark mode", "disable dark mode"),
        ("direction", "flights from rome to paris", "flights from paris to rome"),
        ("question", "when did he die", "where did he die"),
        ("quantifiers", "are all swans white", "are some swans white"),
        ("entity", "my Gmail account", "my Outlook account"),
        ("order", "do dogs bite men", "do men bite dogs"),
        ("form", "2 + 2", "2 - 2"),
        ("signs", "explain \\S carefully", "describe \\s carefully"),
    ],
)
def test_every_rule_has_its_case(rule: str, one: str, other: str) -> None:
    assert veto(one, other) == rule
    assert veto(other, one) == rule
    assert veto(one, one) == veto(other, other) == ""


def test_every_rule_is_tested() -> None:
    assert len(RULES) == 13


WORDS = (
    "what",
    "how",
    "do",
    "i",
    "not",
    "5",
    "km",
    "$",
    "the",
    "a",
    "is",
    "may",
    "12",
    ",",
    "?",
    "us",
    "US",
    "from",
    "%",
)
TEXTS = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from(WORDS)).map(" ".join),
)


@given(TEXTS, TEXTS)
def test_any_text_is_read_and_equality_is_an_equivalence(one: str, other: str) -> None:
    assert strictly_equal(one, other) == strictly_equal(other, one)
    assert veto(one, one) == ""
    assert bool(veto(one, other)) == bool(veto(other, one))
    if words_of(one).letters:
        assert strictly_equal(one, one)


def test_what_is_old_at_once() -> None:
    assert fleeting("What is the weather today?")
    assert not fleeting("What is the weather like on Mars?")


@given(TEXTS, TEXTS)
def test_where_the_words_are_equal_no_rule_objects(one: str, other: str) -> None:
    """Which is why none is asked there."""
    if strictly_equal(one, other):
        a, b = words_of(one), words_of(other)
        assert [name for name, differ in RULES if name != "form" and (differ(a, b) or differ(b, a))] == []


def test_a_difference_is_that_of_words_and_of_what_an_article_stands_before() -> None:
    iron, apple = (difference(f"What is {noun}?", f"What is an {noun}?") for noun in ("iron", "apple"))
    assert iron != apple
    assert difference("What does he like?", "What is he like?") == ((("does he",), ("is he",)), False)
    assert difference("How do I sell it?", "how do i sell it quickly") == difference("Sell it", "Sell it quickly")
    assert difference("Cats eat dogs", "Dogs eat cats") != difference("Cats eat dogs", "Cats eat dogs")
    assert difference("cats eat dogs", "dogs eat cats") == (((), ()), True)


@pytest.mark.parametrize(
    "text",
    [
        "a" * 4096,
        "." * 4095 + "a",
        "“" * 4096,
        '"' * 4095,
        "a." * 2048,
        "1" * 4096,
        "1+" * 2048,
        "I " * 2048,
        "é" * 4096,
    ],
)
def test_long_texts_take_no_longer_than_their_length_says(text: str) -> None:
    """Beside a text of ordinary words of the same length: no rule tries every place again and again."""

    def taken(one: str) -> float:
        begun = time.process_time()
        for number in range(3):
            words_of.__wrapped__(f"{one}{number}")
        return time.process_time() - begun

    plain = min(taken(f"{number} what do people eat in france " * 128) for number in range(3))
    assert min(taken(f"{number}{text}") for number in range(3)) < 20 * plain
