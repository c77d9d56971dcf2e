"""Answers taken apart: streamed as whole under every split, nothing lost, and what is no call stays text."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.parsing.answer import MAX_HELD, AnswerParser, CallDelta, Parsed, whole_calls
from service.core.parsing.calls import ARGS, CALL_ID, CallParser
from service.core.parsing.formats import HERMES, LLAMA, MISTRAL
from service.core.parsing.json_text import JsonStep, JsonValue
from service.core.parsing.reasoning import ReasoningSplitter
from tests.properties import example_count

THINK = ("<think>", "</think>")
TOKENS = "\ud812"  # a marker that is a token
FORMS = {
    "hermes": HERMES,
    "llama": replace(LLAMA, opens=TOKENS),
    "llama spelled": LLAMA,
    "mistral": replace(MISTRAL, opens=TOKENS),
    "mistral spelled": MISTRAL,
}
Call = tuple[str, dict[str, Any]]


def parser(family: str, inside: bool = False) -> AnswerParser:
    numbers = iter(range(10_000))
    calls = CallParser(FORMS[family], True, lambda: f"call{next(numbers)}")
    return AnswerParser(ReasoningSplitter(*THINK, inside), calls)


def parsed(made: AnswerParser, pieces: list[str]) -> list[Parsed]:
    return [*(made.feed(piece) for piece in pieces), made.end()]


def together(found: list[Parsed]) -> tuple[str, str, list[CallDelta]]:
    text, reasoning = ("".join(getattr(one, name) for one in found) for name in ("text", "reasoning"))
    return text, reasoning, whole_calls(call for one in found for call in one.calls)


def whole(family: str, text: str) -> tuple[str, str, list[CallDelta]]:
    return together(parsed(parser(family), [text]))


def calls_of(found: list[CallDelta]) -> list[Call]:
    return [(call.name, json.loads(call.arguments)) for call in found]


WORDS = [
    "a",
    "Łódź",
    "🙂",
    "<",
    "<tool",
    "</",
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    "\n",
    "  ",
    "name",
    ";",
    ",",
    "</think",
    "call",
]


def words(draw: random.Random, most: int) -> str:
    return "".join(draw.choices(WORDS, k=draw.randrange(most)))


def value(draw: random.Random, depth: int = 2) -> Any:
    kind = draw.randrange(8 if depth else 6)
    match kind:
        case 0:
            return draw.choice([None, True, False])
        case 1:
            return draw.randrange(-(10**6), 10**6)
        case 2:
            return draw.uniform(-1e9, 1e-9)
        case 6:
            return [value(draw, depth - 1) for _ in range(draw.randrange(4))]
        case 7:
            return {words(draw, 4): value(draw, depth - 1) for _ in range(draw.randrange(4))}
        case _:
            return words(draw, 12)


def made_object(draw: random.Random) -> dict[str, Any]:
    return {words(draw, 3): value(draw) for _ in range(draw.randrange(4))}


def written(draw: random.Random, family: str, calls: list[Call]) -> str:
    """As a model of that family writes them, with its liberties."""

    def one(call: Call, key: str) -> str:
        members = {"name": call[0], key: call[1]}
        if draw.random() < 0.3:
            members = dict(reversed(members.items()))
        if family.startswith("llama") and draw.random() < 0.3:
            members = {"type": "function", **members}
        text = json.dumps(members, ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, None, 2]))
        return text.replace("/", "\\/") if draw.random() < 0.2 else text

    marker = FORMS[family].opens
    if family == "hermes":
        blank = draw.choice(["\n", "", " "])
        return blank.join(f"<tool_call>{blank}{one(call, 'arguments')}{blank}</tool_call>" for call in calls)
    if family.startswith("llama"):
        start = marker if draw.random() < 0.5 else ""
        return start + "; ".join(one(call, draw.choice(["parameters", "arguments"])) for call in calls)
    if draw.random() < 0.5:
        return f"{marker} [{', '.join(one(call, 'arguments') for call in calls)}]"
    ids = draw.choice(["", f"{CALL_ID}abc123xyz"])
    return "".join(f"{marker}{name}{ids}{ARGS}{json.dumps(arguments)}" for name, arguments in calls)


def conversations(family: str, count: int = 200) -> Iterator[tuple[random.Random, str, str, str, list[Call]]]:
    """An answer, and what it is made of: reasoning, text before the calls, and the calls."""
    draw = random.Random(family)
    for _ in range(count):
        thought = words(draw, 10).replace("</think", "").strip("\n")
        text = "" if family.startswith("llama") else words(draw, 10).strip().replace("<tool", "")
        calls = [
            (f"f_{n}", {words(draw, 3): value(draw) for _ in range(draw.randrange(4))})
            for n in range(draw.randrange(4))
        ]
        answer = (text + written(draw, family, calls)) if calls else text
        think = f"<think>\n{thought}\n</think>\n\n" if draw.random() < 0.5 else ""
        yield draw, think + answer, thought if think else "", text, calls


@pytest.mark.product
@pytest.mark.parametrize("family", FORMS)
def test_two_hundred_conversations(family: str) -> None:
    """Whole, character by character, and in pieces of a few."""
    for draw, answer, thought, text, calls in conversations(family):
        expected = whole(family, answer)
        assert (expected[0].strip(), expected[1], calls_of(expected[2])) == (text.strip(), thought, calls), answer
        assert together(parsed(parser(family), list(answer))) == expected
        size = draw.randrange(2, 30)
        pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
        assert together(parsed(parser(family), pieces)) == expected


@pytest.mark.parametrize("family", FORMS)
def test_every_split_in_two(family: str) -> None:
    for _, answer, *_ in islice((made for made in conversations(family) if 60 < len(made[1]) < 200), 8):
        expected = whole(family, answer)
        for at in range(1, len(answer)):
            assert together(parsed(parser(family), [answer[:at], answer[at:]])) == expected, (answer, at)


@pytest.mark.parametrize("family", FORMS)
def test_cut_short_anywhere_it_is_still_the_same(family: str) -> None:
    """As by `max_tokens`."""
    for _, answer, *_ in islice((made for made in conversations(family) if 60 < len(made[1]) < 150), 4):
        for end in range(len(answer)):
            cut = answer[:end]
            assert together(parsed(parser(family), list(cut))) == whole(family, cut)


NO_CALLS = {
    "hermes": [
        "<tool_call>", "<tool_call>\nnot json", "<tool_call>{}</tool_call>", '<tool_call>{"name": "f"', "</tool_call>",
        '<tool_call>{"arguments": {"a": 1}}</tool_call>', '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', '<tool_call>{"name": "f", "other": {}}</tool_call>',
        "<tool_call>{'name': 'f'}</tool_call>", "<tool_call>[1]</tool_call>", "a <tool_cal", '{"name": "f"}', "<" * 50,
        '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>',
    ],
    "llama spelled": [
        '{"answer": 42}', "{}", '{"name": "x"', "{ not json", '[{"name": "f", "parameters": {}}]', 
        "<|python_tag|>print(1)", 'Here: {"name": "f", "parameters": {}}', '  {"name": 1}',
        '<|python_tag|>brave_search.call(query="x")',
    ],
    "mistral spelled": [
        "[TOOL_CALLS]", "[TOOL_CALLS] []", "[TOOL_CALLS] I think so", '[TOOL_CALLS][{"nam": 1}]', "[TOOL_CALL", "[[[",
        "[TOOL_CALLS] f", "[TOOL_CALLS]!", '[TOOL_CALLS] "f"', "[TOOL_CALLS][[",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("family", "text"), [(family, text) for family, texts in NO_CALLS.items() for text in texts])
def test_what_is_no_call_stays_text_to_the_last_character(family: str, text: str) -> None:
    for around in (text, text + " and more", text + "\n\n"):
        assert together(parsed(parser(family), list(around))) == whole(family, around) == (around, "", [])


def test_what_breaks_off_inside_of_a_call_goes_on_as_text() -> None:
    text, _, (call,) = whole("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, \'b\': 2}}</tool_call>')
    assert (call.arguments, text) == ('{"a": 1, ', "'b': 2}}</tool_call>")
    text, _, (call,) = whole("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "oops": 1}</tool_call>!')
    assert (call.arguments, text) == ('{"a": 1}', ', "oops": 1}</tool_call>!')
    text, _, (call,) = whole("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1')
    assert (call.arguments, text) == ('{"a": 1', "")


def test_text_around_calls() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    text, _, calls = whole("hermes", f"One. {call} two {call}\n{call}\n")
    assert (text, calls_of(calls)) == ("One.  two ", [("f", {})] * 3)
    assert [call.id for call in calls] == ["call0", "call1", "call2"]
    assert whole("hermes", f"{call}</tool_call>")[0] == "</tool_call>"


def test_a_name_comes_once_and_arguments_as_they_are_written() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "long"}}\n</tool_call>'
    deltas = [call for one in parsed(parser("hermes"), list(text)) for call in one.calls]
    assert [(call.id, call.name) for call in deltas if call.name or call.id] == [("call0", "f")]
    assert [call.arguments for call in deltas] == list('{"a": "long"}')


REASONING = [
    ("<think>a</think>b", "a", "b"),
    ("\n <think>\na\n\nb\n</think>\n\nc", "a\n\nb", "c"),
    ("<think>\n\n</think>\n\n\nc", "", "\nc"),
    ("<think>never ends <tool_call>", "never ends <tool_call>", ""),
    ("<think>ends in the middle</thi", "ends in the middle</thi", ""),
    ("no <think>a</think>", "", "no <think>a</think>"),
    ("<thin", "", "<thin"),
    (" " * 65, "", " " * 65),
    ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    ("", "", ""),
]


@pytest.mark.parametrize(("answer", "thought", "text"), REASONING)
def test_reasoning(answer: str, thought: str, text: str) -> None:
    assert whole("hermes", answer) == together(parsed(parser("hermes"), list(answer))) == (text, thought, [])


def test_a_prompt_may_begin_the_reasoning() -> None:
    for answer in ("hm\n</think>\n\nYes", "\nhm</think>Yes"):
        for pieces in ([answer], list(answer)):
            assert together(parsed(parser("hermes", inside=True), pieces)) == ("Yes", "hm", [])


@given(st.lists(st.text(st.sampled_from('<>/think[]{}":, \nTOL_CAname1f;é\ud812\ud810'), max_size=12), max_size=12))
@settings(max_examples=example_count(60), deadline=None)
@pytest.mark.parametrize("family", FORMS)
def test_any_text_in_any_pieces(family: str, pieces: list[str]) -> None:
    expected = whole(family, "".join(pieces))
    assert together(parsed(parser(family), pieces)) == expected
    assert not re.search("[\ud800-\udfff]", expected[0] + expected[1] + "".join(call.arguments for call in expected[2]))


@pytest.mark.parametrize(
    "endless",
    ['<tool_call>{"arguments": {"a": "' + "x" * 100_000, "<tool_call>" + " " * 100_000, "<tool_call>{}" * 10_000,
     '<tool_call>{"name": "f"}' + "\n" * 100_000, '<tool_call>{"name": "' + "f" * 100_000],
)  # fmt: skip
def test_what_is_held_back_is_bounded(endless: str) -> None:
    made, given_out = parser("hermes"), 0
    for at in range(0, len(endless), 1000):
        found = made.feed(endless[at : at + 1000])
        given_out += len(found.text) + sum(len(call.arguments) + len(call.name) for call in found.calls)
        assert at + 1000 - given_out < MAX_HELD + 2000
    assert given_out > 30_000


def fed(text: str) -> JsonStep:
    step, made = JsonStep.MORE, JsonValue()
    for char in text:
        step = made.step(char)
        if step is not JsonStep.MORE:
            break
    return step


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON, st.booleans(), st.sampled_from([None, 1]))
@settings(max_examples=example_count(100), deadline=None)
def test_json_is_read_to_its_end(made: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps([made], ensure_ascii=ascii_only, indent=indent)
    if not any("\ud800" <= char <= "\udfff" for char in text):
        states = JsonValue()
        assert [states.step(char) for char in text] == [JsonStep.MORE] * (len(text) - 1) + [JsonStep.LAST]


@given(st.text(st.sampled_from('{}[]",:\\/ \n0123456789eE+-.truefalsnlbx'), max_size=12))
@settings(max_examples=example_count(300), deadline=None)
def test_json_is_what_python_takes_for_it(text: str) -> None:
    try:
        json.loads(f"[{text}]", parse_constant=_refuse)
        sound = True
    except ValueError:
        sound = False
    made = JsonValue()
    steps: list[JsonStep] = []
    for char in f"[{text}]":
        steps.append(made.step(char))
        if steps[-1] is not JsonStep.MORE:
            break
    assert (len(steps) == len(text) + 2 and steps[-1] is JsonStep.LAST) == sound


def _refuse(name: str) -> None:
    raise ValueError(name)


def test_numbers_end_before_what_is_not_theirs() -> None:
    assert [fed(text) for text in ("12,", "-0.5e+3}", "1.", "-", "01", "1e,", "true", "nul,", '"a"', '"\\u12g')] == [
        JsonStep.BEYOND, JsonStep.BEYOND, JsonStep.MORE, JsonStep.MORE, JsonStep.BEYOND, JsonStep.WRONG, JsonStep.LAST,
        JsonStep.WRONG, JsonStep.LAST,
        JsonStep.WRONG,
    ]  # fmt: skip
