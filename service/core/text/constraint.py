"""Makes callers' constraints into grammars in llguidance's notation, in a text process, since parsing may take long."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from engine.constraints.bounds import OutOfBounds, check_ebnf, check_regex, check_schema, on_own_stack
from engine.constraints.grammars import limits
from engine.constraints.vocabulary import read_vocabulary
from service.core.text.sandbox.jobs import JobRefused
from service.core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_NICE = 10
_NESTED = "is nested too deep"
_MOST_PLACES = 256  # parts of a schema that are tried, to say which is at fault
# One line, as json.dumps writes it: where white space is free, small models write nothing else for a long while.
_STYLE: dict[str, Any] = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "coerce_one_of": False,
    "lenient": False,
}
_DEFINITIONS = ("$defs", "definitions")
_ONE_BELOW = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else")
_LISTS_BELOW = ("prefixItems", "anyOf", "allOf", "oneOf")
_TABLES_BELOW = (*_DEFINITIONS, "properties", "patternProperties")
_DEFINED = tuple(f"/{name}/" for name in _DEFINITIONS)


class ConstraintJob(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    texts: tuple[str, ...]  # one; of a choice, its options


_read = msgspec.msgpack.Decoder(ConstraintJob).decode


def constraint(tokenizer: Tokenizer, payload: bytes) -> bytes:
    """Returns the grammar in UTF-8."""
    job = _read(payload)
    _go_last()
    return on_own_stack(lambda: _made(job)).encode()


def _made(job: ConstraintJob) -> str:
    try:
        return _MAKERS[job.kind](job.texts)
    except OutOfBounds as error:
        raise JobRefused(str(error)) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # what a panic in llguidance, which is Rust, is raised as
            raise
        raise JobRefused("cannot be processed") from None


@lru_cache(maxsize=1)
def _go_last() -> None:
    """Lowers this process's priority for good, below streams and engine steps. It handles constraints only."""
    os.nice(_NICE)


def _of_schema(texts: tuple[str, ...]) -> str:
    schema = _parsed(texts[0])
    if schema is False:
        raise JobRefused("allows nothing")
    if schema is True:
        return _checked(_grammar("{}"))
    if not isinstance(schema, dict):
        raise JobRefused("is neither a JSON object nor true")
    check_schema(schema)
    fault = _fault(_grammar(texts[0]))
    if fault:
        raise JobRefused(_located(schema, fault))
    return _grammar(texts[0])


def _parsed(text: str) -> object:
    def refuse(constant: str) -> None:
        raise JobRefused(f"is not JSON: {constant} is no number")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise JobRefused(f"is not JSON: {error.msg}, line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise JobRefused(_NESTED) from None
    except ValueError as error:  # an integer of thousands of digits
        raise JobRefused(f"is not JSON: {_one_line(str(error))}") from None


def _grammar(schema: str) -> str:
    from llguidance import LLMatcher

    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=_STYLE)  # type: ignore[arg-type]
    except ValueError as error:
        raise JobRefused(_NESTED if "recursion" in str(error) else f"is not JSON: {_one_line(str(error))}") from None


def _located(schema: dict[str, Any], fault: str) -> str:
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    place, part, tried = "", schema, 0
    deeper = True
    while deeper:
        deeper = False
        for step, below in _below(part):
            tried += 1
            if tried > _MOST_PLACES:
                break
            found = _fault(_grammar(json.dumps({**definitions, **below})))
            if found and (found == fault or not step.startswith(_DEFINED)):
                place, part, fault, deeper = place + step, below, found, True
                break
    return f"at {place or '/'}: {fault}"


def _below(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in _TABLES_BELOW:
        table = schema.get(name)
        for key, value in table.items() if isinstance(table, dict) else ():
            if isinstance(value, dict):
                escaped = key.replace("~", "~0").replace("/", "~1")
                yield f"/{name}/{escaped}", value
    for name in _LISTS_BELOW:
        values = schema.get(name)
        for index, value in enumerate(values) if isinstance(values, list) else ():
            if isinstance(value, dict):
                yield f"/{name}/{index}", value
    for name in _ONE_BELOW:
        value = schema.get(name)
        if isinstance(value, dict):
            yield f"/{name}", value


def _of_object(texts: tuple[str, ...]) -> str:
    return _checked(_grammar('{"type": "object"}'))


def _of_regex(texts: tuple[str, ...]) -> str:
    from llguidance import LLMatcher

    check_regex(texts[0])
    return _checked(LLMatcher.grammar_from_regex(texts[0]))


def _of_choice(texts: tuple[str, ...]) -> str:
    from llguidance import LLMatcher

    return _checked(LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, texts))))


def _of_ebnf(texts: tuple[str, ...]) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    check_ebnf(texts[0])
    try:
        lark = any_to_lark(texts[0])
    except RecursionError:
        raise JobRefused(_NESTED) from None
    except Exception as error:  # its own, plain ones, and those of texts that end too early
        raise JobRefused(_one_line(str(error)) or "cannot be read") from None
    check_ebnf(lark)
    return _checked(LLMatcher.grammar_from_lark(lark))


_MAKERS: dict[str, Callable[[tuple[str, ...]], str]] = {
    "json_schema": _of_schema,
    "json_object": _of_object,
    "regex": _of_regex,
    "choice": _of_choice,
    "grammar": _of_ebnf,
}


def _checked(grammar: str) -> str:
    fault = _fault(grammar)
    if fault:
        raise JobRefused(fault)
    return grammar


@lru_cache(maxsize=1)
def _vocabulary() -> LLTokenizer:
    return read_vocabulary("")[0]


def _fault(grammar: str) -> str:
    """Empty where the grammar can be used. It is begun over bytes: what it allows does not depend on the vocabulary."""
    from llguidance import LLMatcher

    fault = LLMatcher.validate_grammar(grammar, limits=limits())
    if fault and not fault.startswith("WARNING"):
        return _one_line(fault)
    matcher = LLMatcher(_vocabulary(), grammar, log_level=0, limits=limits())
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        return "allows nothing, or is too complex"
    return "" if any(mask[:32]) else "allows nothing but an empty answer"


def _one_line(fault: str) -> str:
    """Drops the library's excerpt below its first line; counts places from 1."""
    lines = [line.strip() for line in fault.splitlines() if not re.match(r"\s*\d+ \||\s*\^+\s*$", line)]
    text = re.sub(r"(?:at )?\b(\d+)\((\d+)\):", r"line \1, column \2:", " ".join(filter(None, lines)))
    return text.partition(" while processing json-schema:")[0][:300]
