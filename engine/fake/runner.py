"""Runs steps without torch and weights, and checks the scheduler's plans: for tests and for measuring what is around
the engine.

Ids are a function of the tokens so far (and of the seed, unless greedy). Up to 256 entries of vocabulary they are
printable ASCII, above that anything but the first three. About one in 64 is the request's first stop token, if any.
Sampling fields that need logits change nothing. Of several ids a step, all but the first count as accepted drafts.

With `FakeSettings.faults`, a prompt that begins with (0, fault, n) breaks once n ids have been generated.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import os
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from msgspec.structs import replace

from engine.api import GREEDY, GenerationRequest, ModelInfo, Stopping, TokenLogprob, Unused
from engine.constraints.constraints import Constraints
from engine.errors import EngineFailed, Unsupported
from engine.fake.checker import FACTOR, PRIME, Computed, PlanChecker
from engine.fake.pages import FakePages
from engine.fake.stamps import stamped
from engine.scheduling.plan import Assignment, Row, RowResult, StepPlan, StepResult
from engine.scheduling.sequence_state import SequenceState
from engine.settings import CPU_BATCH_TOKENS, CPU_SEQUENCES, PAGE_SIZE, EngineSettings, ExecutionSwitches

_STOP_ODDS = 64
_SWITCHES = tuple(one.name for one in dataclasses.fields(ExecutionSwitches) if one.name != "batching")


class Fault(enum.IntEnum):
    RAISE = 1  # the step raises
    SICK_ROW = 2  # this row comes back without ids, as for logits that are not finite
    CRASH = 3  # the process dies
    HANG = 4  # the step never ends
    DEVICE = 5  # the step raises what the loss of a device raises
    GRAPHS = 6  # the step raises while the switch `graphs` is on
    MEMORY = 7  # a step that feeds this row finds no memory


def plain_request(token_ids: tuple[int, ...], max_tokens: int = 16, **changes: Any) -> GenerationRequest:
    plain = GenerationRequest(
        request_id="",
        token_ids=token_ids,
        sampling=GREEDY,
        stopping=Stopping(max_tokens=max_tokens),
        arrived_at=time.monotonic(),
    )
    return replace(plain, **changes)


class FakeRunner:
    def __init__(self, settings: EngineSettings, constraints: Constraints | None = None) -> None:
        fake = settings.fake
        self._constraints = constraints or Constraints(settings.model)
        self._fake = fake
        self.checker = PlanChecker(fake.total_pages, settings.max_sequences or CPU_SEQUENCES)
        self._pages = FakePages(self.checker)
        self._ids = range(32, 127) if fake.vocab_size <= 256 else range(3, fake.vocab_size)
        if fake.vocab_size < 127:
            raise Unsupported(f"the fake engine needs a vocabulary of at least 127, not {fake.vocab_size}")
        context = min(fake.max_context, fake.total_pages * PAGE_SIZE, settings.max_context or fake.max_context)
        self._info = ModelInfo(
            architecture="fake",
            weight_format="none",
            dtype="none",
            kv_dtype="none",
            device="none",
            decoder="fake",
            objections=(),
            vocab_size=fake.vocab_size,
            max_context=context,
            max_sequences=settings.max_sequences or CPU_SEQUENCES,
            max_batch_tokens=settings.max_batch_tokens or CPU_BATCH_TOKENS,
            page_size=PAGE_SIZE,
            total_pages=fake.total_pages,
            weights_bytes=0,
            weights_digest=hashlib.sha256(b"fake %d" % fake.vocab_size).hexdigest(),
            lookahead_tokens=fake.tokens_per_step - 1,
            max_tokens_per_row=fake.tokens_per_step,
            unused=tuple(Unused(name=name, reason="the fake engine has no kernels") for name in _SWITCHES),
        )
        self._graphs = settings.graphs
        self._piece: Callable[[], bool] = lambda: False  # of other work

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def pages(self) -> FakePages:
        return self._pages

    def run(self, plan: StepPlan, assignment: Assignment | None = None) -> StepResult:
        started = time.monotonic()
        self.checker.begin(plan)
        self._constraints.begin(plan)
        results: dict[int, RowResult] = {}
        for row in plan.rows:
            held = self.checker.feed(row)
            if row.sample:
                results[row.key] = self._sample(row, held)
            if row.score:
                results[row.key] = results.get(row.key, RowResult(())).scored(self._scores(row, held.state))
        while self._piece():
            pass
        if self._fake.step_time:
            time.sleep(max(0.0, started + self._fake.step_time - time.monotonic()))
        result = StepResult(results)
        return stamped(result) if self._fake.stamps else result

    def meanwhile(self, piece: Callable[[], bool]) -> None:
        self._piece = piece

    def set_optimization(self, name: str, enabled: bool) -> None:
        if name not in _SWITCHES:
            raise Unsupported(f"the fake engine has no optimisation {name!r}")
        if name == "graphs":
            self._graphs = enabled

    def close(self) -> None:
        self._constraints.close()

    def _sample(self, row: Row, held: Computed) -> RowResult:
        state = held.state
        plain = self._is_plain(state)
        if not plain and self._breaks(state):
            return RowResult(())
        count = self._fake.tokens_per_step
        if count > 1:
            count = min(count, len(state.pages) * PAGE_SIZE - row.start - row.count + 1)
            if state.draft_limit is not None:
                count = min(count, 1 + state.draft_limit)
        result = self._draw(held, count, plain) if state.constraint is None else self._allowed(row, held)
        self.checker.brought(row, held, result)
        return result

    def _is_plain(self, state: SequenceState) -> bool:
        if state.stopping.stop_token_ids or state.logprobs is not None:
            return False
        return not self._fake.faults or state.token_ids[0] != 0

    def _draw(self, held: Computed, count: int, plain: bool) -> RowResult:
        state = held.state
        noise = state.sampling.seed % PRIME if state.sampling.temperature else 0
        digest, ids = held.digest, self._ids
        held.digested += count
        if plain and count == 1:
            token_id = ids[(digest ^ noise) * FACTOR % PRIME % len(ids)]
            held.digest = (digest * FACTOR + token_id) % PRIME
            return RowResult((token_id,))
        output = state.output_length
        drawn, logprobs = [], []
        for index in range(output, output + count):
            bits = (digest ^ noise) * FACTOR % PRIME
            token_id = self._choose(state, index, bits)
            digest = (digest * FACTOR + token_id) % PRIME
            drawn.append(token_id)
            if state.logprobs is not None:
                logprobs.append(self._logprob(token_id, state.logprobs, bits))
        held.digest = digest
        return RowResult(tuple(drawn), tuple(logprobs), count - 1, count - 1)

    def _allowed(self, row: Row, held: Computed) -> RowResult:
        mask, vocabulary = int.from_bytes(self._constraints.mask(row.key), "little"), self._info.vocab_size
        allowed = [token_id for token_id in range(vocabulary) if mask >> token_id & 1]
        if not allowed:
            return self._constraints.stuck(row.key)
        noise = held.state.sampling.seed % PRIME if held.state.sampling.temperature else 0
        bits = (held.digest ^ noise) * FACTOR % PRIME
        chosen = RowResult((allowed[bits % len(allowed)],))
        if held.state.logprobs is not None:
            chosen = RowResult(chosen.token_ids, (self._logprob(chosen.token_ids[0], held.state.logprobs, bits),))
        return self._constraints.follow((row,), {row.key: chosen})[row.key]

    def _choose(self, state: SequenceState, index: int, bits: int) -> int:
        stops = state.stopping.stop_token_ids
        place = bits % len(self._ids)
        if not stops:
            return self._ids[place]
        if index >= state.stopping.min_tokens:
            return stops[0] if bits // len(self._ids) % _STOP_ODDS == 0 else self._ids[place]
        turned = (self._ids[place - offset] for offset in range(len(self._ids)))
        return next((token_id for token_id in turned if token_id not in stops), self._ids[place])

    def _logprob(self, token_id: int, count: int, bits: int) -> TokenLogprob:
        logprob = -(1 + bits % 128) / 64
        others = [other for other in self._ids[: count + 1] if other != token_id]
        top = [token_id, *others][:count]
        return TokenLogprob(logprob, tuple((other, logprob - rank / 8) for rank, other in enumerate(top)))

    def _scores(self, row: Row, state: SequenceState) -> tuple[TokenLogprob, ...]:
        ids = state.token_ids[row.start : min(row.start + row.count + 1, state.prompt_length)]
        count = state.prompt_logprobs or 0
        return tuple(self._logprob(after, count, before * FACTOR + after) for before, after in pairwise(ids))

    def _breaks(self, state: SequenceState) -> bool:
        """Causes the prompt's fault; True where only this row fails."""
        first, fault, after = (*state.token_ids[: min(3, state.prompt_length)], 0, 0)[:3]
        if not self._fake.faults or first != 0 or state.output_length < after:
            return False
        match fault:
            case Fault.RAISE:
                raise EngineFailed("as asked")
            case Fault.GRAPHS if self._graphs:
                raise EngineFailed("as asked, with graphs")
            case Fault.DEVICE:
                raise AcceleratorError("as asked")
            case Fault.MEMORY:
                raise OutOfMemoryError("as asked")
            case Fault.CRASH:
                os._exit(1)  # as after a fault that a library does not survive
            case Fault.HANG:
                while True:
                    time.sleep(3600)
        return fault == Fault.SICK_ROW


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's error for lack of memory."""


class AcceleratorError(RuntimeError):
    """Has the name of torch's error for a lost device."""
