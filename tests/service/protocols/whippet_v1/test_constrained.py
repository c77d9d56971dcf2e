"""Constraints through a real channel, on an engine of bytes: answers are as asked for, what cannot be is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import grpc
import jsonschema
import pytest

from service.pb.whippet.v1 import generation_pb2 as pb
from service.protocols.sampling_fields import MAX_CONSTRAINT
from tests.service.conftest import Server, ask, ask_stream, refused

pytestmark = pytest.mark.product

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "state": {"enum": ["on", "off"]}},
    "required": ["name", "state"],
    "additionalProperties": False,
}
TEXT = json.dumps(SCHEMA)


def constrained(tokens: int = 200, **constraint: Any) -> pb.GenerateRequest:
    return ask("hello", tokens, constraint=constraint)


def said(server: Server, request: pb.GenerateRequest) -> str:
    answer = server.generation.Generate(request, timeout=60)
    assert answer.finish.reason == pb.FINISH_REASON_STOP
    return str(answer.text)


def test_answers_are_as_asked_for(server: Server) -> None:
    jsonschema.validate(json.loads(said(server, constrained(json_schema=TEXT))), SCHEMA)
    assert re.fullmatch("[0-9]{4}-[a-f]{2}", said(server, constrained(regex="[0-9]{4}-[a-f]{2}")))
    options = ['a "b"', "back\\slash", "two\nlines", "naïve 😀"]
    assert said(server, constrained(choice={"options": options})) in options
    assert set(said(server, constrained(grammar='start: "(" start ")" | "x"\n'))) <= set("()x")
    assert said(server, constrained(grammar='root ::= [0-9] "!"')).endswith("!")


def test_any_object(server: Server) -> None:
    answer = server.generation.Generate(constrained(json_object=True), timeout=60)
    assert answer.text.startswith("{")
    if answer.finish.reason == pb.FINISH_REASON_STOP:
        assert isinstance(json.loads(answer.text), dict)


def test_a_stream_says_the_same_and_counts_what_was_forced(server: Server) -> None:
    asked = ask_stream("hello", 200, constraint={"json_schema": TEXT}, output={"token_ids": True})
    messages = list(server.generation.GenerateStream(asked, timeout=60))
    whole = server.generation.Generate(pb.GenerateRequest.FromString(asked.SerializeToString()), timeout=60)
    assert "".join(one.text for one in messages) == whole.text
    ids = [token for one in messages for token in one.token_ids]
    assert bytes(ids).decode() == whole.text
    assert messages[-1].finish.usage.completion_tokens == len(ids) == whole.finish.usage.completion_tokens


def test_max_tokens_and_stop_strings_cut_it(server: Server) -> None:
    cut = server.generation.Generate(constrained(4, json_schema=TEXT), timeout=60)
    assert (cut.text, cut.finish.reason) == ('{"na', pb.FINISH_REASON_LENGTH)
    request = constrained(json_schema=TEXT)
    request.stopping.stop_strings.append("me")
    stopped = server.generation.Generate(request, timeout=60)
    assert (stopped.text, stopped.finish.reason) == ('{"na', pb.FINISH_REASON_STOP_STRING)
    assert stopped.finish.usage.completion_tokens == 6


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no kind": ({}, "constraint", "is needed"),
    "no JSON": ({"json_schema": '{"type":\n "object",}'}, "constraint.json_schema", "line 2, column"),
    "no schema": ({"json_schema": "[1]"}, "constraint.json_schema", "neither a JSON object nor true"),
    "nothing": ({"json_schema": "false"}, "constraint.json_schema", "allows nothing"),
    "a wrong type": (
        {"json_schema": json.dumps({"properties": {"a": {"items": {"type": "strin"}}}})},
        "constraint.json_schema",
        "at /properties/a/items: Invalid type: strin",
    ),
    "what is not enforced": (
        {"json_schema": json.dumps({"anyOf": [{"type": "null"}, {"not": {"type": "null"}}]})},
        "constraint.json_schema",
        "at /anyOf/1: Unimplemented keys",
    ),
    "a pattern": (
        {"json_schema": json.dumps({"$defs": {"x/y": {"pattern": "(a"}}, "$ref": "#/$defs/x~1y"})},
        "constraint.json_schema",
        "at /$defs/x~1y: regex parse error",
    ),
    "no such definition": ({"json_schema": '{"$ref": "#/$defs/no"}'}, "constraint.json_schema", "/$defs/no"),
    "a reference elsewhere": ({"json_schema": '{"$ref": "http://10.0.0.1/x"}'}, "constraint.json_schema", "at /"),
    "a loop": (
        {"json_schema": json.dumps({"$defs": {"x": {"$ref": "#/$defs/x"}}, "$ref": "#/$defs/x"})},
        "constraint.json_schema",
        "allows nothing",
    ),
    "deep": ({"json_schema": '{"items":' * 5000 + "{}" + "}" * 5000}, "constraint.json_schema", "nested too deep"),
    "large": ({"json_schema": " " * (MAX_CONSTRAINT + 1)}, "constraint.json_schema", "is larger than"),
    "false object": ({"json_object": False}, "constraint.json_object", "must be true"),
    "a bracket": ({"regex": "a(b"}, "constraint.regex", "line 1, column"),
    "look-around": ({"regex": "a(?=b)"}, "constraint.regex", "look-around"),
    "an empty regex": ({"regex": ""}, "constraint.regex", "empty"),
    "nothing matches": ({"regex": "[^\\s\\S]"}, "constraint.regex", "allows nothing"),
    "no option": ({"choice": {}}, "constraint.choice.options", "1 to 1024 texts"),
    "an empty option": ({"choice": {"options": ["a", ""]}}, "constraint.choice.options", "none of them empty"),
    "no rule": ({"grammar": 'start: "a" b'}, "constraint.grammar", "line 1, column 8"),
    "GBNF": ({"grammar": 'root ::= "a" | ('}, "constraint.grammar", "line 1"),
    "rules in a circle": ({"grammar": "start: a\na: b\nb: a"}, "constraint.grammar", "allows nothing"),
    "brackets": ({"grammar": "root ::= " + "(" * 5000}, "constraint.grammar", "nested too deep"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_with_its_place(server: Server, case: str) -> None:
    constraint, field, words = REFUSED[case]
    request = ask("hello", 8)
    request.constraint.SetInParent()
    request.constraint.MergeFrom(pb.Constraint(**constraint))
    refusal = refused(server.generation.Generate, request)
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT, refusal
    (violation,) = refusal.details["BadRequest"].field_violations  # type: ignore[attr-defined]
    assert violation.field == field
    assert words in violation.description
    assert "\n" not in violation.description


def outcome_of(server: Server, request: pb.GenerateRequest) -> grpc.StatusCode:
    try:
        server.generation.Generate(request, timeout=60)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_hostile_ones_take_no_more_than_their_bounds_and_nobody_with_them(server: Server) -> None:
    """Refused or answered, and the server goes on."""
    regexes = ("((((a{1,99}){1,99}){1,99}){1,99}){1,99}", ".*" * 2000 + "x", "(a*)*" * 500, "x" * 200_000)
    many = {"anyOf": [{"type": "string", "maxLength": n, "minLength": n // 2} for n in range(500, 1500)]}
    hostile = [constrained(4, regex=regex) for regex in regexes]
    hostile.append(constrained(4, json_schema=json.dumps(many)))
    ends = {outcome_of(server, request) for request in hostile}
    assert ends <= {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}
    assert said(server, constrained(choice={"options": ["yes"]})) == "yes"


def test_the_same_words_with_another_constraint_are_another_question(cached: Server) -> None:
    def outcome(**constraint: Any) -> tuple[str, str]:
        request = ask("the same", 40, **({"constraint": constraint} if constraint else {}))
        request.sampling.temperature = 0
        answer, call = cached.generation.Generate.with_call(request, timeout=60)
        return answer.text, dict(call.initial_metadata())["x-cache"]

    answers = [outcome(regex="[0-9]{3}"), outcome(regex="[a-z]{3}"), outcome()]
    other = answers[1][0]
    assert [header for _, header in answers] == ["miss"] * 3
    assert len({text for text, _ in answers}) == 3
    cached.until(lambda load: not load.running)
    assert outcome(regex="[a-z]{3}") == (other, "hit-response")
