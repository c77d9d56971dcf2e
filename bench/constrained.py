"""The demo model on the CPU behind a scheduler, with plans and results held to their rules: answers to constraints."""

from __future__ import annotations

import functools
import itertools
import time
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
from service.core.text.jobs import pack
from service.core.text.tokenizer import Tokenizer as TextTokenizer

DEMO = Path("models/demo")
EOS = (2, 0)
PATIENT = Budget(step_wait=600)  # seconds; no other requests wait for these masks


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def grammar(kind: str, *texts: str) -> Constraint:
    """As a server makes it. Raises Refusal."""
    return Constraint(constraint(TextTokenizer.of_bytes(), pack(ConstraintJob(kind, texts))).decode())


def asked(constraint: Constraint | None, seed: int = 0, tokens: int = 400, **changes: Any) -> GenerationRequest:
    """At temperature 1."""
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
class Outcome:
    """What came of a request."""

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

    def answer(self, requests: Items[GenerationRequest]) -> list[Outcome]:
        told = {next(self._keys): Outcome() for _ in requests}
        for key, request in zip(told, requests, strict=True):
            self.scheduler.admit(Sequence(request, list(request.token_ids), key=key))
        while self.scheduler.live:
            plan = self.scheduler.plan(time.monotonic())
            assert plan is not None
            for event in self.scheduler.commit(plan, self.runner.run(plan), time.monotonic()):
                one = told[event.key]
                one.steps += 1
                one.ids += event.token_ids
                one.logprobs += event.logprobs
                one.finish, one.failure = event.finish, event.failure
        return list(told.values())


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
