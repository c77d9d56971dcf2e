"""Constrained answers: two libraries beside each other, and what a constraint costs a stream of the demo model.

    python -m bench.constraints --append bench/results/constraints-cpu.json

Each library that is installed compiles 500 made schemas over the demo model's vocabulary and walks an answer to each,
token by token. Then the engine answers all of them at temperature 1, on a CPU, and jsonschema judges the answers.
xgrammar is no dependency of ours: `pip install --no-deps --target DIR xgrammar apache-tvm-ffi`, and PYTHONPATH=DIR.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
from msgspec.structs import replace

from bench.about import device, revision
from bench.constrained import DEMO, EOS, Answering, Outcome, asked, demo, grammar, tokenizer
from bench.schemas import Schema, schemas
from engine.api import FinishReason
from engine.constraints.grammars import Grammars
from service.core.text.jobs import Refusal

# Keywords that the made schemas leave out, one each: which of them a library enforces, passes over, or refuses.
RARE: dict[str, Schema] = {
    "not": {"type": "integer", "not": {"const": 3}},
    "if": {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "uniqueItems": {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True},
    "contains": {"type": "array", "contains": {"const": 1}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "minProperties": {"type": "object", "minProperties": 2},
    "patternProperties": {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
    "allOf": {"allOf": [{"type": "object", "properties": {"a": {"type": "null"}}}, {"required": ["a"]}]},
    "oneOf, apart": {"oneOf": [{"type": "integer"}, {"type": "null"}]},
    "oneOf, overlapping": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "format unknown": {"type": "string", "format": "colour"},
    "$ref elsewhere": {"$ref": "http://example.com/schema"},
}


def of_llguidance() -> Callable[[str], Callable[[list[int]], None]]:
    kept = Grammars(str(DEMO))
    kept.vocabulary()

    def compile_(schema: str) -> Callable[[list[int]], None]:
        matcher = kept.matcher(grammar("json_schema", schema).grammar)

        def walk(ids: list[int]) -> None:
            for token_id in ids:
                matcher.compute_bitmask()
                if not matcher.consume_token(token_id):
                    raise ValueError("an answer is not allowed")

        return walk

    return compile_


def of_xgrammar() -> Callable[[str], Callable[[list[int]], None]]:
    import transformers
    import xgrammar

    known = transformers.AutoTokenizer.from_pretrained(str(DEMO))
    info = xgrammar.TokenizerInfo.from_huggingface(known, stop_token_ids=list(EOS))
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    bits = xgrammar.allocate_token_bitmask(1, info.vocab_size)

    def compile_(schema: str) -> Callable[[list[int]], None]:
        compiled = compiler.compile_json_schema(schema, any_whitespace=False, separators=(", ", ": "))
        matcher = xgrammar.GrammarMatcher(compiled)

        def walk(ids: list[int]) -> None:
            for token_id in ids:
                matcher.fill_next_token_bitmask(bits)
                if not matcher.accept_token(token_id):
                    raise ValueError("an answer is not allowed")

        return walk

    return compile_


LIBRARIES = {"llguidance": of_llguidance, "xgrammar": of_xgrammar}


def library(name: str, made: list[Schema], answers: list[list[int]]) -> dict[str, Any]:
    """Milliseconds to compile and a mask; how many schemas and answers it takes."""
    compile_ = LIBRARIES[name]()
    compiling, masking, refused, denied = [], [], 0, 0
    for schema, ids in zip(made, answers, strict=True):
        begun = time.perf_counter()
        try:
            walk = compile_(json.dumps(schema))
        except (Refusal, RuntimeError, ValueError):
            refused += 1
            continue
        compiling.append((time.perf_counter() - begun) * 1e3)
        begun = time.perf_counter()
        try:
            walk(ids)
        except ValueError:
            denied += 1
            continue
        masking.append((time.perf_counter() - begun) * 1e3 / max(1, len(ids)))
    rare = {}
    for keyword, schema in RARE.items():
        try:
            compile_(json.dumps(schema))
            rare[keyword] = "taken"
        except (Refusal, RuntimeError, ValueError):
            rare[keyword] = "refused"
    return {
        "bench": "library",
        "library": name,
        "schemas": len(made),
        "refused": refused,
        "answers_denied": denied,
        **summary("compile_ms", compiling),
        **summary("mask_ms", masking),
        "rare": rare,
    }


def summary(name: str, values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        f"{name}_p50": round(statistics.median(ordered), 3),
        f"{name}_p99": round(ordered[int(0.99 * (len(ordered) - 1))], 3),
        f"{name}_max": round(ordered[-1], 3),
    }


def answered(engine: Answering, made: list[Schema], tokens: int) -> tuple[dict[str, Any], list[Outcome]]:
    """The engine's answers to all of them at temperature 1, judged."""
    told: list[Outcome] = []
    for start in range(0, len(made), 8):
        batch = made[start : start + 8]
        forms = [grammar("json_schema", json.dumps(schema)) for schema in batch]
        told += engine.answer([asked(form, seed=start + n, tokens=tokens) for n, form in enumerate(forms)])
    finished = [n for n, one in enumerate(told) if one.finish and one.finish.reason is FinishReason.STOP]
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    valid = sum(
        jsonschema.Draft202012Validator(made[n], format_checker=checker).is_valid(json.loads(told[n].text))
        for n in finished
    )
    ids = sum(len(told[n].ids) for n in finished)
    result = {
        "bench": "answers",
        "schemas": len(made),
        "finished": len(finished),
        "valid": valid,
        "failed": sum(one.failure is not None for one in told),
        "tokens": ids,
        "steps": sum(told[n].steps for n in finished),
    }
    return result, told


def streams(engine: Answering, count: int, rounds: int) -> dict[str, Any]:
    """Milliseconds a step of `count` streams, without a constraint and with one that allows nearly everything, in
    turns; so that steps and not answers are compared, ends of text are not taken."""
    loose = grammar("regex", "(?s).*")
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for constrained, times in seconds.items():
            requests = [asked(loose if constrained else None, seed=n, tokens=64) for n in range(count)]
            requests = [replace(one, stopping=replace(one.stopping, stop_token_ids=())) for one in requests]
            begun = time.perf_counter()
            engine.answer(requests)
            times.append((time.perf_counter() - begun) * 1e3 / 64)
    plain, with_one = (statistics.median(times) for times in seconds.values())
    return {
        "bench": "streams",
        "streams": count,
        "plain_step_ms": round(plain, 2),
        "constrained_step_ms": round(with_one, 2),
        "speed": round(plain / with_one, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=400, help="of an answer, at most")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--append", type=Path, help="file of results")
    given = parser.parse_args()
    engine, made = Answering(demo(speculation=False)), schemas(given.schemas)
    result, told = answered(engine, made, given.tokens)
    results = [result, *(streams(engine, count, given.rounds) for count in (1, 8))]
    cut = [one.ids if one.finish and one.finish.reason is FinishReason.STOP else [] for one in told]
    results += [library(name, made, cut) for name in LIBRARIES if importlib.util.find_spec(name) is not None]
    kept = json.loads(given.append.read_text()) if given.append and given.append.exists() else []
    for one in results:
        kept.append({**one, "vocabulary": tokenizer().get_vocab_size(), "device": device(), "revision": revision()})
        print(json.dumps(kept[-1]))
    if given.append:
        given.append.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
