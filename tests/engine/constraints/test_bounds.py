"""What a constraint may be at most, and how a refusal names the place. No library is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import pytest

from bench.constrained import schemas
from engine.constraints.bounds import (
    MOST_REGEX,
    MOST_RULES,
    OutOfBounds,
    check_ebnf,
    check_grammar,
    check_regex,
    check_schema,
    on_own_stack,
)
from engine.constraints.chains import deepest


def lark_chain(depth: int, around: str = "{}", name: str = "r") -> str:
    rules = "\n".join(f"{name}{n}: " + around.format(f"{name}{n + 1}") for n in range(depth))
    return f'start: {name}0\n{rules}\n{name}{depth}: "a"\n'


def gbnf_chain(depth: int) -> str:
    return "root ::= r0\n" + "\n".join(f'r{n} ::= r{n + 1} [^"(]' for n in range(depth)) + f'\nr{depth} ::= "a"\n'


def reference_chain(depth: int, name: str = "#/$defs/d{}", **more: Any) -> dict[str, Any]:
    links = {
        f"d{n}": {"type": "object", "properties": {"x": {"$ref": name.format(n + 1)}}, "$anchor": f"d{n}"}
        for n in range(depth)
    }
    last: dict[str, Any] = {f"d{depth}": {"type": "null", "$anchor": f"d{depth}"}}
    return {"$ref": name.format(0), "$defs": links | last, **more}


CIRCLE = "start: r0\n" + "\n".join(f'r{n}: "a" (r{(n + 1) % 600} | "b")' for n in range(600))
BEYOND: dict[str, tuple[Any, str]] = {
    "a chain of rules": (lark_chain(1100), "line 1025, column 1"),
    "a chain of terminals": (lark_chain(1100, '"a" {} "b"', "T"), "line 1025, column 1"),
    "a chain that is nested": (lark_chain(400, '(("a" {}))'), "line 3"),
    "a circle": (CIRCLE, "rules that use each other, line"),
    "GBNF": (gbnf_chain(1100), "line 1025, column 1"),
    "too many rules": (lark_chain(MOST_RULES), f"more than {MOST_RULES} rules"),
    "brackets": ("start: " + "(" * 101 + '"a"' + ")" * 101, "line 1, column 108"),
    "a regex in it": ("start: /" + "(" * 101 + "a" + ")" * 101 + "/", "line 1, column 8"),
    "a %regex in it": (f'start: %regex {{"substring_chars": "{"a" * MOST_REGEX}"}}', "line 1, column"),
    "a schema in it": (f"start: %json {json.dumps(reference_chain(400))}", "/$defs/d339"),
    "definitions": (reference_chain(400), "/$defs/d339"),
    "anchors": (reference_chain(400, "#d{}"), "/$defs/d339"),
    "escaped references": (reference_chain(400, "#/%24defs/d{}"), "/$defs/d339"),
    "references with an address": (reference_chain(400, "https://a.b/#d{}"), "/$defs/d341"),
    "a deep schema": (json.loads('{"items":' * 100 + "{}" + "}" * 100), "/items/items"),
    "a wide schema": ({"enum": [*range(40_000)]}, "more than 32768 values"),
    "a pattern in it": ({"items": {"pattern": "(" * 101}}, "/items/pattern"),
}


@pytest.mark.parametrize("case", BEYOND)
def test_what_is_beyond_a_bound_is_refused_with_its_place(case: str) -> None:
    given, place = BEYOND[case]
    check = check_ebnf if isinstance(given, str) else check_schema
    with pytest.raises(OutOfBounds) as refused:
        check(given)
    assert place in str(refused.value)
    if isinstance(given, dict):  # as the engine is given it
        with pytest.raises(OutOfBounds):
            check_grammar(json.dumps({"grammars": [{"json_schema": given, "lark_grammar": None}]}))


REGEXES = {
    "(" * 100 + "a": "character 100",
    "[" * 120: "character 1",
    "a" + "?" * 101: "character 102",
    "(((a{30}){30}){20}){20}7": "character 20",
    "(a|b{4}){30000}": "character 9",
    r"(\(\[a]{400}){400}": "character 14",
    "x" * (MOST_REGEX + 1): f"more than {MOST_REGEX} characters",
}


@pytest.mark.parametrize("pattern", REGEXES)
def test_regexes_beyond_a_bound(pattern: str) -> None:
    with pytest.raises(OutOfBounds) as refused:
        check_regex(pattern)
    assert REGEXES[pattern] in str(refused.value)


@pytest.mark.parametrize(
    "pattern",
    [
        "(" * 99 + "a" + ")" * 99,
        r"\(" * 500,
        "[(]" * 500,
        "[^]]{3}",
        "(a{1,200}x){1,200}",
        "x{,5}{",
        "a{2}{3}",
        "[[:alpha:]]+",
    ],
)
def test_regexes_within_all_bounds(pattern: str) -> None:
    check_regex(pattern)
    check_ebnf(f"start: /{pattern}/\n")


def test_usual_ones_are_within_all_bounds() -> None:
    for schema in schemas(200):
        check_schema(schema)
    check_ebnf(lark_chain(1000))
    check_ebnf(gbnf_chain(500))
    check_schema(reference_chain(330))
    check_schema({"$ref": "#", "$defs": {"tree": {"items": {"$ref": "#/$defs/tree"}}}})
    check_schema(True)
    check_ebnf(
        'start: a | b\n  | "x:y(((" c // ((( "\na.5: /a\\/:b/ "\\""\nb[lazy]: %json {"type": "object"} c\nc: "d"~2..3\n'
    )


@pytest.mark.parametrize("text", ["{", '{"grammars": 1}', '{"grammars": [1]}', "{}"])
def test_what_is_no_grammar_is_refused(text: str) -> None:
    with pytest.raises(OutOfBounds):
        check_grammar(text)


def test_depth_is_counted_through_circles_and_users() -> None:
    nodes = {"a": (1, ["b", "gone"]), "b": (2, ["c", "d"]), "c": (3, ["b"]), "d": (4, [])}
    assert deepest(nodes, 10) is None
    assert deepest(nodes, 9) == "d"
    assert deepest(nodes, 5) in ("b", "c")
    assert deepest({}, 0) is None


def test_what_raises_on_its_own_stack_raises_here() -> None:
    with pytest.raises(KeyError):
        on_own_stack(lambda: {}[1])
    before = threading.stack_size()
    assert on_own_stack(lambda: threading.current_thread().name) == "constraint"
    assert threading.stack_size() == before


# Times the bound that the library survives on that stack. Terminals inside each other take it a minute beyond that.
MARGINS = {"rules": 12, "terminals": 3, "definitions": 12}
AT_THE_MARGIN = """
import json, sys
from engine.constraints import bounds
from tests.engine.constraints.test_bounds import lark_chain, reference_chain
from llguidance import LLMatcher
from engine.constraints.vocabulary import read_vocabulary
vocabulary = read_vocabulary("")[0]
grammars = dict(
    rules=lambda units: LLMatcher.grammar_from_lark(lark_chain(units)),
    terminals=lambda units: LLMatcher.grammar_from_lark(lark_chain(units, '"a" {} "b"', "T")),
    definitions=lambda units: LLMatcher.grammar_from_json_schema(json.dumps(reference_chain(units // 3))),
)
for kind, margin in json.loads(sys.argv[1]).items():
    grammar = grammars[kind](bounds.MOST_DEPTH * margin)
    bounds.on_own_stack(lambda: LLMatcher(vocabulary, grammar, log_level=0).compute_bitmask())
    print(kind)
"""


USUAL, UNLIMITED = 8 * 2**20, -1  # bytes of the main thread's stack


@pytest.mark.product
def test_the_library_survives_twice_the_bound() -> None:
    survives(dict.fromkeys(MARGINS, 2), USUAL)


@pytest.mark.proof
@pytest.mark.parametrize("kind", MARGINS)
@pytest.mark.parametrize("stack", [USUAL, UNLIMITED], ids=["usual stack", "unlimited stack"])
def test_the_library_survives_many_times_the_bound(kind: str, stack: int) -> None:
    survives({kind: MARGINS[kind]}, stack)


def survives(margins: dict[str, int], stack: int) -> None:
    """A process of its own compiles grammars of each kind, so many times as deep as the bound."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if stack == -1 and hard != resource.RLIM_INFINITY:
        pytest.skip("the stack cannot be unlimited here")

    # By a shell: a `preexec_fn` would fork this process, whose threads of grpc end such children now and then.
    size = "unlimited" if stack == -1 else str(stack >> 10)
    done = subprocess.run(
        [
            "/bin/sh",
            "-c",
            'ulimit -S -s "$0" && exec "$@"',
            size,
            sys.executable,
            "-c",
            AT_THE_MARGIN,
            json.dumps(margins),
        ],
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.decode().split() == list(margins)
