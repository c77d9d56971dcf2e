"""Checks constraints against bounds of depth, rules, size and repetition before llguidance reads any of them, in the
front and in the engine's processes.

llguidance parses recursively, and a stack overflow ends the process. So no constraint deeper than MOST_DEPTH reaches
it, and it runs on a stack of STACK bytes, enough for nineteen times that depth
(docs/adr/0062-constraints-in-processes.md).

Depth is counted from the outermost level inwards; all rules or definitions that can reach each other in a cycle count.
The checks do not recurse.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from engine.constraints.chains import deepest

T = TypeVar("T")
Items = dict[str, Any] | list[Any]
STACK: Final = 64 * 2**20  # bytes of the thread in which the library runs
MOST_DEPTH: Final = 1024  # levels: brackets and values inside each other, through references to rules and definitions
MOST_NESTED: Final = 100  # brackets inside each other in one rule, regex or JSON text
MOST_RULES: Final = 2048  # of a grammar
MOST_VALUES: Final = 32_768  # of a schema: objects, lists and what is in them
MOST_REGEX: Final = 64 * 2**10  # characters of one regex
MOST_REPEATED: Final = 100_000  # characters of a regex once its repetitions are expanded

_REPETITION = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}")
_LEXEMES = re.compile(
    r"""(?P<space>\s+) | (?P<comment>(?://|\#)[^\n]*) | (?P<string>"(?:\\.|[^"\\\n])*"i?)
    | (?P<regex>/(?:\\.|[^/\\])+/[imslux]*) | (?P<inline>%[a-z]+\s*(?=\{)) | (?P<name>[!?]?[A-Za-z_][\w-]*)
    | (?P<define>::=|:) | (?P<open>[(\[{]) | (?P<close>[)\]}]) | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_CLASS = re.compile(r"(?:\\.|[^\]\\])*\]", re.DOTALL)  # rest of a GBNF class, behind its opening bracket
_ANCHORS = ("$id", "id", "$anchor", "$dynamicAnchor")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class OutOfBounds(ValueError):
    """Tells the caller which bound a constraint exceeds, and where."""


@dataclass(slots=True)
class _Rule:
    place: str
    depth: int = 1  # levels of nesting inside the rule itself
    uses: dict[str, None] = field(default_factory=dict)  # in order: the same place is named in every process


def check_grammar(grammar: str) -> None:
    """Takes llguidance's own JSON, or Lark's notation. Raises OutOfBounds."""
    if not grammar.lstrip().startswith("{"):
        check_ebnf(grammar)
        return
    try:
        parts = json.loads(grammar)["grammars"]
        named = [(part.get("lark_grammar"), part.get("json_schema")) for part in parts]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise OutOfBounds("is no grammar that can be checked") from None
    for lark, schema in named:
        if isinstance(lark, str):
            check_ebnf(lark)
        if schema is not None:
            check_schema(schema)


def check_regex(pattern: str, place: str = "") -> None:
    """`place` is where the regex stands in a larger text. Raises OutOfBounds."""
    if len(pattern) > MOST_REGEX:
        raise OutOfBounds(f"is a regex of more than {MOST_REGEX} characters{place}")
    _Regex(pattern, place).check()


def check_ebnf(text: str) -> None:
    """Takes Lark's notation or GBNF. Raises OutOfBounds."""
    gbnf = "::=" in text and not re.search(r"(?m)^\s*(?:%llguidance\b|start\s*:(?!:=))", text)
    rules = _rules(text, gbnf)
    if len(rules) > MOST_RULES:
        raise OutOfBounds(f"has more than {MOST_RULES} rules")
    _check_chains(rules, "rules that use each other")


def check_schema(schema: Any) -> None:
    """Raises OutOfBounds, whose text has a JSON pointer to the place."""
    pointers: set[str] = set()
    anchors: dict[str, str] = {}
    references: dict[str, None] = {}
    values = 0
    for pointer, depth, value in _walk(schema):
        pointers.add(pointer)
        values += 1 + len(value)
        if values > MOST_VALUES:
            raise OutOfBounds(f"has more than {MOST_VALUES} values")
        if depth > MOST_NESTED:
            raise OutOfBounds(f"is nested too deep (more than {MOST_NESTED} levels) at {_excerpt(pointer)}")
        if isinstance(value, dict):
            _check_patterns(pointer, value)
            anchors |= {value[name]: pointer for name in _ANCHORS if isinstance(value.get(name), str)}
            references |= dict.fromkeys(_referred(value))
    _check_chains(_definitions(schema, pointers, anchors, references), "definitions that refer to each other")


def on_own_stack(work: Callable[[], T]) -> T:
    """Runs `work` in a thread with a stack of STACK bytes; reraises its exception. Raises MemoryError without room for
    it."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # a panic in Rust is no Exception
            failure.append(error)

    before = threading.stack_size(STACK)
    try:
        thread = threading.Thread(target=run, name="constraint")
        thread.start()
    except RuntimeError:
        raise MemoryError from None  # for the thread's stack
    finally:
        threading.stack_size(before)
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


# Regexes


class _Regex:
    def __init__(self, pattern: str, place: str) -> None:
        self._pattern = pattern
        self._place = place
        self._groups: list[float] = [0.0]  # characters of each group that is open, repetition included
        self._last = 0.0  # characters of the part that a repetition would repeat
        self._repeats = 0  # consecutive repetition operators

    def check(self) -> None:
        pattern, at = self._pattern, 0
        while at < len(pattern):
            sign = pattern[at]
            if sign in "*+?":
                self._repeat(at, 1)
                at += 1
                continue
            counted = _REPETITION.match(pattern, at) if sign == "{" else None
            if counted is not None and (counted[1] or counted[3]):
                self._repeat(at, max(int(counted[1][:9] or 0), int(counted[3][:9] or 0), 1))
                at = counted.end()
                continue
            at = self._single(at, sign)

    def _single(self, at: int, sign: str) -> int:
        self._repeats = 0
        if sign == "(":
            self._groups.append(0.0)
            if len(self._groups) > MOST_NESTED:
                raise OutOfBounds(f"is nested too deep (more than {MOST_NESTED} levels){self._at(at)}")
            return at + 1
        if sign == ")" and len(self._groups) > 1:
            self._last = self._groups.pop()
            self._groups[-1] += self._last
            return at + 1
        self._last = 1.0
        self._groups[-1] += 1.0
        if sign == "\\":
            return at + 2
        return self._behind_class(at) if sign == "[" else at + 1

    def _repeat(self, at: int, times: int) -> None:
        self._repeats += 1
        if self._repeats > MOST_NESTED:
            raise OutOfBounds(f"is nested too deep (more than {MOST_NESTED} levels){self._at(at)}")
        more = self._last * (times - 1)
        self._groups[-1] += more
        self._last += more
        if self._groups[-1] > MOST_REPEATED:
            raise OutOfBounds(f"repeats more than {MOST_REPEATED} characters{self._at(at)}")

    def _behind_class(self, at: int) -> int:
        """Classes may be nested; a closing bracket right behind the first opening one is a literal."""
        depth, begun, at = 1, at, at + 1
        if self._pattern[at : at + 1] == "^":
            at += 1
        if self._pattern[at : at + 1] == "]":
            at += 1
        while depth and at < len(self._pattern):
            sign = self._pattern[at]
            at += 2 if sign == "\\" else 1
            depth += (sign == "[") - (sign == "]")
            if depth + len(self._groups) > MOST_NESTED:
                raise OutOfBounds(f"is nested too deep (more than {MOST_NESTED} levels){self._at(begun)}")
        return at

    def _at(self, at: int) -> str:
        return self._place or f" at character {at + 1}"


# Grammars


def _rules(text: str, gbnf: bool) -> dict[str, _Rule]:
    found: dict[str, _Rule] = {}
    rule = _Rule("line 1, column 1")
    names: list[tuple[str, int]] = []  # names and offsets in the current rule so far
    open_ = at = 0
    while at < len(text):
        lexeme = _LEXEMES.match(text, at)
        assert lexeme is not None  # the last alternative takes anything
        kind, at = lexeme.lastgroup, lexeme.end()
        if kind == "regex" and gbnf:
            at = lexeme.start() + 1  # a slash has no meaning in GBNF
        elif kind == "regex":
            pattern = lexeme[0].rpartition("/")[0][1:]
            check_regex(pattern, f" at {_place(text, lexeme.start())}")
            rule.depth = max(rule.depth, 1 + open_ + pattern.count("("))
        elif kind == "inline":
            at = _inline(text, lexeme[0].strip(), at)
        elif kind == "open" and lexeme[0] == "[" and gbnf:
            behind = _CLASS.match(text, at)
            at = len(text) if behind is None else behind.end()
        elif kind in ("open", "close"):
            open_ = max(0, open_ + (1 if kind == "open" else -1))
            rule.depth = max(rule.depth, 1 + open_)
            if open_ > MOST_NESTED:
                raise OutOfBounds(
                    f"is nested too deep (more than {MOST_NESTED} levels) at {_place(text, lexeme.start())}"
                )
        elif kind == "name":
            names.append((lexeme[0].lstrip("!?"), lexeme.start()))
        elif kind == "define" and names:
            name, begin = _defined(names, text, gbnf)
            rule.uses.update(dict.fromkeys(used for used, _ in names))
            names, open_ = [], 0
            rule = found.setdefault(name, _Rule(_place(text, begin)))
    rule.uses.update(dict.fromkeys(used for used, _ in names))
    return found


def _defined(names: list[tuple[str, int]], text: str, gbnf: bool) -> tuple[str, int]:
    """Removes the name being defined from `names`: the last that stands first in its line. Those left belong to the
    rule before."""
    for index in range(len(names) - 1, -1, -1):
        begin = names[index][1]
        line = text.rfind("\n", 0, begin) + 1
        if gbnf or not text[line:begin].strip():
            name = names[index]
            del names[index]
            return name
    return names.pop()


def _inline(text: str, word: str, at: int) -> int:
    """Checks an embedded `%json {…}` or `%regex {…}`; returns the index behind it."""
    if word == "%lark":
        return at  # its rules count as this grammar's
    try:
        value, end = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return at
    if word == "%json":
        check_schema(value)
    elif end - at > MOST_REGEX:
        raise OutOfBounds(f"has a %regex of more than {MOST_REGEX} characters at {_place(text, at)}")
    return end


def _place(text: str, at: int) -> str:
    line = text.rfind("\n", 0, at)
    return f"line {text.count(chr(10), 0, at) + 1}, column {at - line}"


# Schemas


def _walk(schema: Any) -> Iterator[tuple[str, int, Items]]:
    todo = [("#", 1, schema)] if isinstance(schema, (dict, list)) else []
    while todo:
        pointer, depth, value = todo.pop()
        yield pointer, depth, value
        for name, below in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(below, (dict, list)):
                step = str(name).replace("~", "~0").replace("/", "~1")
                todo.append((f"{pointer}/{step}", depth + 1, below))


def _check_patterns(pointer: str, value: dict[str, Any]) -> None:
    if isinstance(pattern := value.get("pattern"), str):
        check_regex(pattern, f" at {_excerpt(pointer)}/pattern")
    if isinstance(patterns := value.get("patternProperties"), dict):
        for name in patterns:
            check_regex(name, f" at {_excerpt(pointer)}/patternProperties")


def _referred(value: dict[str, Any]) -> list[str]:
    return [value[name] for name in _REFERENCES if isinstance(value.get(name), str)]


def _definitions(
    schema: Any, pointers: set[str], anchors: dict[str, str], references: Iterable[str]
) -> dict[str, _Rule]:
    """The whole schema and every place that has an anchor or is referred to. A reference with an unknown target counts
    as one to each."""
    targets: dict[str, tuple[str, ...]] = {}
    for reference in references:
        pointer = unquote(reference.rstrip("/")) or "#"
        named = anchors.get(reference) or anchors.get(pointer.lstrip("#"))
        known = pointer if pointer in pointers else named
        targets[reference] = (known,) if known else ()
    names = dict.fromkeys(("#", *anchors.values(), *chain(*targets.values())))
    found = {one: _Rule(f"at {_excerpt(one)}") for one in names}
    around: dict[str, tuple[tuple[str, int], ...]] = {}  # by pointer: the places of `found` around it, and their depths
    for pointer, depth, value in _walk(schema):
        outside = around.get(pointer.rpartition("/")[0], ())
        inside = around[pointer] = (*outside, (pointer, depth)) if pointer in found else outside
        used = _referred(value) if isinstance(value, dict) else ()
        for name, begin in inside:
            found[name].depth = max(found[name].depth, 1 + depth - begin)
            for reference in used:
                found[name].uses.update(dict.fromkeys(targets[reference] or found))
    return found


def _excerpt(pointer: str) -> str:
    return pointer.removeprefix("#")[:200] or "/"


def _check_chains(rules: dict[str, _Rule], what: str) -> None:
    found = deepest({name: (rule.depth, rule.uses) for name, rule in rules.items()}, MOST_DEPTH)
    if found is not None:
        raise OutOfBounds(f"is more than {MOST_DEPTH} levels deep through {what}, {rules[found].place}")
