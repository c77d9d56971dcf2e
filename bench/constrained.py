"""Runs the demo model on the CPU behind a scheduler, with checked plans and results: answers to constraints."""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from tokenizers import Tokenizer

from engine.api import Constraint, Finish, GenerationRequest, Stopping, TokenLogprob
from engine.constraints.budget import Budget
from engine.constraints.constraints import Constraints
from engine.fake import plain_request
from engine.fake.checked import CheckedRunner
from engine.ipc.events import Failure
from engine.kv.page_pool import PagePool
from engine.scheduling.limits import Limits
from engine.scheduling.plan import Runner
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.settings import EngineSettings
from engine.worker.build import build
from service.core.text.constraint import ConstraintJob, constraint
from service.core.text.sandbox.jobs import pack
from service.core.text.tokenizer import Tokenizer as TextTokenizer

DEMO = Path("models/demo")
EOS = (2, 0)
PATIENT = Budget(step_wait=600)  # seconds; no other requests wait for these masks


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def grammar(kind: str, *texts: str) -> Constraint:
    """Makes a constraint as a server does. Raises JobRefused."""
    return Constraint(constraint(TextTokenizer.of_bytes(), pack(ConstraintJob(kind, texts))).decode())


def asked(constraint: Constraint | None, seed: int = 0, tokens: int = 400, **changes: Any) -> GenerationRequest:
    prompt = "<|im_start|>user\nTell me.<|im_end|>\n<|im_start|>assistant\n"
    plain = plain_request(tuple(tokenizer().encode(prompt).ids))
    return replace(
        plain,
        sampling=replace(plain.sampling, temperature=1.0, seed=seed),
        stopping=Stopping(max_tokens=tokens, stop_token_ids=EOS),
        constraint=constraint,
        **changes,
    )


@dataclass
class ConstrainedOutcome:
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    failure: Failure | None = None
    steps: int = 0  # that brought something

    @property
    def text(self) -> str:
        return tokenizer().decode(self.ids)


class Answering:
    """Runs requests to their end, all at once."""

    def __init__(self, inner: Runner, pages: int | None = None) -> None:
        self.runner, info = CheckedRunner(inner), inner.info
        limits = Limits(
            max_sequences=info.max_sequences,
            max_batch_tokens=64,
            max_context=info.max_context if pages is None else pages * info.page_size,
            lookahead_tokens=info.lookahead_tokens,
            max_tokens_per_row=info.max_tokens_per_row,
        )
        self.scheduler = Scheduler(limits, PagePool(pages or info.total_pages))
        self._keys = itertools.count(1)

    def answer(self, requests: Items[GenerationRequest]) -> list[ConstrainedOutcome]:
        outcomes = {next(self._keys): ConstrainedOutcome() for _ in requests}
        for key, request in zip(outcomes, requests, strict=True):
            self.scheduler.admit(Sequence(request, list(request.token_ids), key=key))
        while self.scheduler.live:
            plan = self.scheduler.plan(time.monotonic())
            assert plan is not None
            for event in self.scheduler.commit(plan, self.runner.run(plan), time.monotonic()):
                one = outcomes[event.key]
                one.steps += 1
                one.ids += event.token_ids
                one.logprobs += event.logprobs
                one.finish, one.failure = event.finish, event.failure
        return list(outcomes.values())


def demo(sequences: int = 8, speculation: bool = True) -> Runner:
    settings = EngineSettings(
        model=str(DEMO),
        device="cpu",
        dtype="float32",
        threads=1,
        max_sequences=sequences,
        speculation=speculation,
    )
    return build(settings, lambda phase, done, total: None, Constraints(str(DEMO), PATIENT))


Schema = dict[str, Any]

_NAMES = ("id", "name", "city", "age", "tags", "kind", "size", "notes", "email", "price", "parent", "created_at", "a b")
_WORDS = ("red", "green", "blue", "small", "large", "on", "off", "a/b", 'quo"te', "café", "", "N/A", "x y", "\\")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email", "hostname")
_PATTERNS = ("^[A-Z]{2}[0-9]{3}$", "^[a-z]+(-[a-z]+){0,2}$", "^v[0-9]+\\.[0-9]+$", "^(yes|no|maybe)$", "^.{3,5}$")


class Schemas:
    """Makes them. The same seed makes the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._leaves: tuple[Callable[[], Schema], ...] = (
            self._string,
            self._pattern,
            self._format,
            self._integer,
            self._number,
            self._enum,
            self._const,
            lambda: {"type": "boolean"},
            lambda: {"type": "null"},
        )

    def schema(self) -> Schema:
        """Makes a schema with an object at the top, as nearly all have."""
        if self._random.random() < 0.06:
            return self._recursive()
        if self._random.random() < 0.2:
            return self._referring()
        return self._object(self._random.randint(1, 3))

    def _any(self, depth: int) -> Schema:
        if depth <= 0:
            return self._random.choice(self._leaves)()
        return self._random.choice((self._object, self._array, self._union, lambda _: self._any(0)))(depth - 1)

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(_NAMES, self._random.randint(1, 4))
        required = [name for name in names if self._random.random() < 0.7]
        return {
            "type": "object",
            "properties": {name: self._any(depth) for name in names},
            "required": required,
            "additionalProperties": False,
        }

    def _array(self, depth: int) -> Schema:
        least = self._random.randint(0, 2)
        if self._random.random() < 0.2:
            parts = [self._any(depth - 1) for _ in range(self._random.randint(1, 3))]
            return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
        return {"type": "array", "items": self._any(depth), "minItems": least, "maxItems": least + 2}

    def _union(self, depth: int) -> Schema:
        if self._random.random() < 0.3:
            return {"type": ["integer", "null"], "minimum": 0, "maximum": 99}
        return {"anyOf": [self._any(depth - 1), self._any(0), {"type": "null"}]}

    def _string(self) -> Schema:
        least = self._random.randint(0, 4)
        return {"type": "string", "minLength": least, "maxLength": least + self._random.randint(0, 12)}

    def _pattern(self) -> Schema:
        return {"type": "string", "pattern": self._random.choice(_PATTERNS), "maxLength": 24}

    def _format(self) -> Schema:
        return {"type": "string", "format": self._random.choice(_FORMATS)}

    def _integer(self) -> Schema:
        least = self._random.randint(-50, 50)
        bounds = {"minimum": least, "maximum": least + self._random.randint(0, 500)}
        if self._random.random() < 0.2:
            return {"type": "integer", "exclusiveMinimum": least, "exclusiveMaximum": least + 12}
        return {"type": "integer", **bounds}

    def _number(self) -> Schema:
        if self._random.random() < 0.3:
            return {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 10}
        return {"type": "number", "minimum": 0, "maximum": self._random.choice((1, 100, 1e4))}

    def _enum(self) -> Schema:
        values: list[Any] = self._random.sample(_WORDS, self._random.randint(1, 5))
        return {"enum": values + self._random.choice(([], [None], [1, 2.5], [True]))}

    def _const(self) -> Schema:
        return {"const": self._random.choice(("fixed", 7, None, False, {"v": [1, "x"]}, ["a", "b"]))}

    def _referring(self) -> Schema:
        """Definitions that are used more than once."""
        place = self._random.choice(("$defs", "definitions"))
        return {
            "type": "object",
            "properties": {
                "from": {"$ref": f"#/{place}/point"},
                "to": {"$ref": f"#/{place}/point"},
                "label": self._any(1),
            },
            "required": ["from", "to"],
            "additionalProperties": False,
            place: {"point": self._object(1)},
        }

    def _recursive(self) -> Schema:
        return {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "value": self._any(0),
                        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                    },
                    "required": ["value", "next"],
                    "additionalProperties": False,
                }
            },
        }


def schemas(count: int, seed: int = 0) -> list[Schema]:
    """Draws `count` schemas, the same for a seed."""
    made = Schemas(seed)
    return [made.schema() for _ in range(count)]
