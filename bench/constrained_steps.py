"""What a constraint costs steps on a GPU: streams with and without one in turns, those beside one, forced tokens.

    python -m bench.constrained_steps --model bench/models/qwen3-0.6b --append bench/results/constrained-h100.json

Weights are random, and so is the text; masks are llguidance's, over a made vocabulary of the model's size.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence as Items
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from msgspec.structs import replace

from bench.about import device, revision
from bench.constrained import grammar
from engine.api import Constraint, GenerationRequest, Stopping
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


class Words:
    """A tokenizer of so many tokens: bytes, marks of JSON, and made words with and without a space before them."""

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
        """Longest first."""
        left, found = text.encode() if isinstance(text, str) else text, []
        while left:
            size = next(size for size in range(min(16, len(left)), 0, -1) if left[:size] in self._known)
            found.append(self._known[left[:size]])
            left = left[size:]
        return found


class WordGrammars(Grammars):
    """Over such a vocabulary."""

    def __init__(self, size: int) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        super().__init__("")
        self._words = LLTokenizer(TokenizerWrapper(Words(size))), size - 1

    def vocabulary(self) -> tuple[LLTokenizer, int]:
        return self._words


class Bench:
    """A runner, and schedulers over it one after the other."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._keys = itertools.count(1)

    def run(self, requests: Items[GenerationRequest]) -> list[tuple[int, float]]:
        """Of each: its tokens, and how many came a second after the first."""
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
        said = dict.fromkeys(keys, 0)
        times: dict[int, list[float]] = {}
        while (plan := scheduler.plan(time.monotonic())) is not None:
            for event in scheduler.commit(plan, self._runner.run(plan), time.monotonic()):
                assert event.failure is None
                now = time.monotonic()
                said[event.key] += len(event.token_ids)
                times.setdefault(event.key, [now, now])[1] = now
        return [(said[key], (said[key] - 1) / max(1e-9, times[key][1] - times[key][0])) for key in keys]

    def in_turns(self, kinds: dict[str, list[GenerationRequest]], counted: int, rounds: int) -> dict[str, float]:
        """Tokens a second of the first so many requests of each kind together; the first round is not counted."""
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(rounds + 1):
            for kind, requests in kinds.items():
                rates[kind].append(sum(rate for _, rate in self.run(requests)[:counted]))
        return {kind: statistics.median(of_kind[1:]) for kind, of_kind in rates.items()}


def asked(at: int, form: Constraint | None, tokens: int, temperature: float = 0.0) -> GenerationRequest:
    base = plain_request(tuple(range(100 + at, 140 + at)))
    sampling = replace(base.sampling, temperature=temperature, seed=at)
    return replace(base, sampling=sampling, stopping=Stopping(max_tokens=tokens), constraint=form)


def measured(bench: Bench, rounds: int, tokens: int) -> list[dict[str, Any]]:
    loose, person = grammar("regex", "(?s).*"), grammar("json_schema", json.dumps(PERSON))
    found: list[dict[str, Any]] = []
    for streams in (1, 8):
        kinds = {
            name: [asked(n, form, tokens) for n in range(streams)] for name, form in (("plain", None), ("in", loose))
        }
        rates = bench.in_turns(kinds, streams, rounds)
        plain, within = rates["plain"], rates["in"]
        found.append({"bench": "streams", "streams": streams, "plain": plain, "constrained": within})
    mates = [asked(n, None, tokens) for n in range(7)]
    rates = bench.in_turns({"alone": mates, "beside": [*mates, asked(9, loose, tokens)]}, 7, rounds)
    found.append({"bench": "mates", "plain": rates["alone"], "constrained": rates["beside"]})
    for one in found:
        one["speed"] = round(one["constrained"] / one["plain"], 3)
    for streams, most in itertools.product((1, 8), (made.MOST_FORCED, 0)):
        with mock.patch.object(made, "MOST_FORCED", most):
            bench.run([asked(n, person, 400, 1.0) for n in range(streams)])
            begun = time.monotonic()
            said = sum(count for count, _ in bench.run([asked(n, person, 400, 1.0) for n in range(streams)]))
            rate = said / (time.monotonic() - begun)
        found.append({"bench": "jump", "streams": streams, "forced": most > 0, "tokens": said, "tokens_per_s": rate})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    for one in measured(Bench(runner), given.rounds, given.tokens):
        rounded = {
            name: round(value) if isinstance(value, float) and value > 2 else value for name, value in one.items()
        }
        kept.append({"model": given.model.name, **rounded, "device": device(), "revision": revision()})
        print(json.dumps(kept[-1]))
    if given.append:
        given.append.write_text(json.dumps(kept, indent=1) + "\n")
    runner.close()


def quiet(phase: str, done: int, total: int) -> None:
    """Nobody watches."""


if __name__ == "__main__":
    main()
