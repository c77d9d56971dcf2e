"""Measures constrained answers: two libraries beside each other, and what a constraint costs a stream of the demo
model.

    python -m bench.constraints --append bench/results/constraints-cpu.json

Each library that is installed compiles 500 made schemas over the demo model's vocabulary and walks an answer to each,
token by token. Then the engine answers all of them at temperature 1, on a CPU, and jsonschema judges the answers.
xgrammar is no dependency of ours: `pip install --no-deps --target DIR xgrammar apache-tvm-ffi`, and PYTHONPATH=DIR.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import jsonschema
from msgspec.structs import replace

from bench.constrained import DEMO, EOS, Answering, ConstrainedOutcome, Schema, asked, demo, grammar, schemas, tokenizer
from bench.result import device, revision, run_one_of
from engine.api import Constraint, FinishReason, GenerationRequest, Stopping
from engine.constraints import following as made
from engine.constraints.constraints import Constraints
from engine.constraints.grammars import Grammars
from engine.fake import plain_request
from engine.kv.page_pool import PagePool
from engine.scheduling.limits import Limits
from engine.scheduling.plan import Runner
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.settings import EngineSettings
from engine.worker.build import make_runner, prepare
from service.core.text.sandbox.jobs import JobRefused

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
    """Measures milliseconds to compile and per mask; how many schemas and answers it takes."""
    compile_ = LIBRARIES[name]()
    compiling, masking, refused, denied = [], [], 0, 0
    for schema, ids in zip(made, answers, strict=True):
        begun = time.perf_counter()
        try:
            walk = compile_(json.dumps(schema))
        except (JobRefused, RuntimeError, ValueError):
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
        except (JobRefused, RuntimeError, ValueError):
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


def answered(engine: Answering, made: list[Schema], tokens: int) -> tuple[dict[str, Any], list[ConstrainedOutcome]]:
    """Validates the engine's answers to all of them at temperature 1."""
    outcomes: list[ConstrainedOutcome] = []
    for start in range(0, len(made), 8):
        batch = made[start : start + 8]
        forms = [grammar("json_schema", json.dumps(schema)) for schema in batch]
        outcomes += engine.answer([asked(form, seed=start + n, tokens=tokens) for n, form in enumerate(forms)])
    finished = [n for n, one in enumerate(outcomes) if one.finish and one.finish.reason is FinishReason.STOP]
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    valid = sum(
        jsonschema.Draft202012Validator(made[n], format_checker=checker).is_valid(json.loads(outcomes[n].text))
        for n in finished
    )
    ids = sum(len(outcomes[n].ids) for n in finished)
    result = {
        "bench": "answers",
        "schemas": len(made),
        "finished": len(finished),
        "valid": valid,
        "failed": sum(one.failure is not None for one in outcomes),
        "tokens": ids,
        "steps": sum(outcomes[n].steps for n in finished),
    }
    return result, outcomes


def streams(engine: Answering, count: int, rounds: int) -> dict[str, Any]:
    """Measures milliseconds a step of `count` streams, without a constraint and with one that allows nearly everything,
    in turns; so that steps and not answers are compared, ends of text are not taken."""
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
    result, outcomes = answered(engine, made, given.tokens)
    results = [result, *(streams(engine, count, given.rounds) for count in (1, 8))]
    cut = [one.ids if one.finish and one.finish.reason is FinishReason.STOP else [] for one in outcomes]
    results += [library(name, made, cut) for name in LIBRARIES if importlib.util.find_spec(name) is not None]
    kept = json.loads(given.append.read_text()) if given.append and given.append.exists() else []
    for one in results:
        kept.append({**one, "vocabulary": tokenizer().get_vocab_size(), "device": device(), "revision": revision()})
        print(json.dumps(kept[-1]))
    if given.append:
        given.append.write_text(json.dumps(kept, indent=1) + "\n")


if TYPE_CHECKING:
    from llguidance import LLTokenizer

MARKS = (
    '"',
    '":',
    '": ',
    '", "',
    '": "',
    "{",
    "}",
    "[",
    "]",
    "],",
    "},",
    '{"',
    '"}',
    "true",
    "false",
    "null",
    ": ",
    ", ",
)
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "colour of the house": {"enum": ["dark red", "green"]},
        "years": {"type": "integer", "minimum": 3, "maximum": 17},
        "members of the family": {
            "type": "array",
            "minItems": 6,
            "maxItems": 6,
            "items": {
                "type": "object",
                "properties": {
                    "given name": {"type": "string", "minLength": 4, "maxLength": 12},
                    "date of birth": {"type": "string", "format": "date"},
                    "is still alive": {"type": "boolean"},
                },
                "required": ["given name", "date of birth", "is still alive"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["name", "colour of the house", "years", "members of the family"],
    "additionalProperties": False,
}


class FakeTokenizer:
    """Makes a vocabulary: bytes, marks of JSON, and made words with and without a space before them."""

    bos_token_id = None

    def __init__(self, size: int) -> None:
        chance, letters = random.Random(1), "etaoinshrdlcumwfgypbvkjxqz"
        seen = dict.fromkeys([*(bytes([byte]) for byte in range(256)), *(mark.encode() for mark in MARKS)])
        while len(seen) < size - 1:
            word = "".join(chance.choices(letters, range(26, 0, -1), k=chance.choice((2, 3, 3, 4, 4, 5, 6, 7, 8))))
            seen[(chance.choice(("", " ", " ")) + chance.choice((word, word, word.title()))).encode()] = None
        self.tokens = [*seen, b"<end>"]
        self.eos_token_id = size - 1
        self.special_token_ids = (size - 1,)
        self._known = {token: at for at, token in enumerate(self.tokens)}

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokenizes greedily by the longest match."""
        left, found = text.encode() if isinstance(text, str) else text, []
        while left:
            size = next(size for size in range(min(16, len(left)), 0, -1) if left[:size] in self._known)
            found.append(self._known[left[:size]])
            left = left[size:]
        return found


class WordGrammars(Grammars):
    def __init__(self, size: int) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        super().__init__("")
        self._words = LLTokenizer(TokenizerWrapper(FakeTokenizer(size))), size - 1

    def vocabulary(self) -> tuple[LLTokenizer, int]:
        return self._words


class ConstraintBench:
    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._keys = itertools.count(1)

    def run(self, requests: Items[GenerationRequest]) -> list[tuple[int, float]]:
        """Runs requests together. Returns for each its tokens, and how many came a second after the first."""
        info = self._runner.info
        limits = Limits(
            max_sequences=16,
            max_batch_tokens=2048,
            max_context=info.max_context,
            lookahead_tokens=info.lookahead_tokens,
            max_tokens_per_row=info.max_tokens_per_row,
        )
        scheduler = Scheduler(limits, PagePool(info.total_pages))
        keys = [next(self._keys) for _ in requests]
        for key, one in zip(keys, requests, strict=True):
            scheduler.admit(Sequence(one, list(one.token_ids), key=key))
        emitted = dict.fromkeys(keys, 0)
        times: dict[int, list[float]] = {}
        while (plan := scheduler.plan(time.monotonic())) is not None:
            for event in scheduler.commit(plan, self._runner.run(plan), time.monotonic()):
                assert event.failure is None
                now = time.monotonic()
                emitted[event.key] += len(event.token_ids)
                times.setdefault(event.key, [now, now])[1] = now
        return [(emitted[key], (emitted[key] - 1) / max(1e-9, times[key][1] - times[key][0])) for key in keys]

    def in_turns(self, kinds: dict[str, list[GenerationRequest]], counted: int, rounds: int) -> dict[str, float]:
        """Measures tokens a second of the first `counted` requests of each kind together; the first round is not
        counted."""
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(rounds + 1):
            for kind, requests in kinds.items():
                rates[kind].append(sum(rate for _, rate in self.run(requests)[:counted]))
        return {kind: statistics.median(of_kind[1:]) for kind, of_kind in rates.items()}


def steps_asked(at: int, form: Constraint | None, tokens: int, temperature: float = 0.0) -> GenerationRequest:
    base = plain_request(tuple(range(100 + at, 140 + at)))
    sampling = replace(base.sampling, temperature=temperature, seed=at)
    return replace(base, sampling=sampling, stopping=Stopping(max_tokens=tokens), constraint=form)


def measured(bench: ConstraintBench, rounds: int, tokens: int) -> list[dict[str, Any]]:
    loose, person = grammar("regex", "(?s).*"), grammar("json_schema", json.dumps(PERSON))
    found: list[dict[str, Any]] = []
    for streams in (1, 8):
        kinds = {
            name: [steps_asked(n, form, tokens) for n in range(streams)]
            for name, form in (("plain", None), ("in", loose))
        }
        rates = bench.in_turns(kinds, streams, rounds)
        plain, within = rates["plain"], rates["in"]
        found.append({"bench": "streams", "streams": streams, "plain": plain, "constrained": within})
    others = [steps_asked(n, None, tokens) for n in range(7)]
    rates = bench.in_turns({"alone": others, "beside": [*others, steps_asked(9, loose, tokens)]}, 7, rounds)
    found.append({"bench": "mates", "plain": rates["alone"], "constrained": rates["beside"]})
    for one in found:
        one["speed"] = round(one["constrained"] / one["plain"], 3)
    for streams, most in itertools.product((1, 8), (made.MOST_FORCED, 0)):
        with mock.patch.object(made, "MOST_FORCED", most):
            bench.run([steps_asked(n, person, 400, 1.0) for n in range(streams)])
            begun = time.monotonic()
            emitted = sum(count for count, _ in bench.run([steps_asked(n, person, 400, 1.0) for n in range(streams)]))
            rate = emitted / (time.monotonic() - begun)
        found.append({"bench": "jump", "streams": streams, "forced": most > 0, "tokens": emitted, "tokens_per_s": rate})
    return found


def steps_main() -> None:
    """Measures what a constraint costs steps on a GPU: streams with and without one in turns, those beside one, forced
    tokens.

        python -m bench.constraints steps --model bench/models/qwen3-0.6b --append bench/results/constrained-h100.json

    Weights are random, and so is the text; masks are llguidance's, over a made vocabulary of the model's size.
    """
    parser = argparse.ArgumentParser(
        description=inspect.getdoc(steps_main), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a folder whose weights are not read")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--append", type=Path, help="file of results")
    given = parser.parse_args()
    settings = EngineSettings(
        model=str(given.model), device=given.device, load_format="dummy", max_sequences=16, speculation=False,
        max_context=1024, kv_bytes=1 << 31,
    )  # fmt: skip
    words = WordGrammars(json.loads((given.model / "config.json").read_text())["vocab_size"])
    constraints = Constraints(grammars=words)
    runner = make_runner(settings, prepare(settings, quiet, constraints), quiet)
    kept = json.loads(given.append.read_text()) if given.append and given.append.exists() else []
    for one in measured(ConstraintBench(runner), given.rounds, given.tokens):
        rounded = {
            name: round(value) if isinstance(value, float) and value > 2 else value for name, value in one.items()
        }
        kept.append({"model": given.model.name, **rounded, "device": device(), "revision": revision()})
        print(json.dumps(kept[-1]))
    if given.append:
        given.append.write_text(json.dumps(kept, indent=1) + "\n")
    runner.close()


def quiet(phase: str, done: int, total: int) -> None:
    pass


if __name__ == "__main__":
    sys.exit(run_one_of(main, steps=steps_main))
