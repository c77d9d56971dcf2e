"""The engine that needs no torch and no weights: for tests and for measuring what is around it.

Ids are a function of the tokens so far (and of the seed, unless greedy). Up to 256 entries of vocabulary they are
printable ASCII, above that anything but the first three, whole code points or not. About one in 64 is the request's
first stop token, where it has one. Fields of SamplingParams that need logits change nothing, since there are none.

It keeps a shadow of the page pool and refuses a plan that reads what was not computed or was overwritten. With
`FakeSettings.faults`, a prompt that begins with (0, fault, n) breaks once n ids have been generated.
"""

from __future__ import annotations

import enum
import hashlib
import os
import signal
import time
from dataclasses import dataclass, field

from engine.api import GenerationRequest, ModelInfo, TokenLogprob
from engine.errors import EngineFailed, Unsupported
from engine.plan import Row, RowResult, StepPlan, StepResult
from engine.sequence import Sequence
from engine.settings import PAGE_SIZE, EngineSettings

_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
_EOS_ODDS = 64


class Fault(enum.IntEnum):
    """Second token of a prompt that breaks things."""

    RAISE = 1  # the step raises
    SICK_ROW = 2  # this row comes back without ids, as for logits that are not finite
    CRASH = 3  # the process dies
    HANG = 4  # the step never ends
    DEVICE = 5  # the step raises what the loss of a device raises


@dataclass(slots=True, eq=False)
class _Shadow:
    """What was fed of the sequence that owns a slot."""

    sequence: Sequence
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    digest: int = 0  # of token_ids[:digested]
    digested: int = 0
    overwritten: bool = False


class FakeRunner:
    """Implements engine.plan.Runner."""

    def __init__(self, settings: EngineSettings) -> None:
        fake = settings.fake
        self._fake = fake
        self._shadows: dict[int, _Shadow | None] = {}  # slot → what was fed of its owner; None: nothing yet
        self._writers: list[_Shadow | None] = [None] * fake.total_pages
        self._ids = range(32, 127) if fake.vocab_size <= 256 else range(3, fake.vocab_size)
        if fake.vocab_size < 127:
            raise Unsupported(f"the fake engine needs a vocabulary of at least 127, not {fake.vocab_size}")
        context = min(fake.max_context, fake.total_pages * PAGE_SIZE, settings.max_context or fake.max_context)
        self._info = ModelInfo(
            architecture="fake",
            weight_format="none",
            dtype="none",
            device="none",
            decoder="fake",
            objections=(),
            vocab_size=fake.vocab_size,
            max_context=context,
            max_sequences=settings.max_sequences,
            page_size=PAGE_SIZE,
            total_pages=fake.total_pages,
            weights_bytes=0,
            weights_digest=hashlib.sha256(b"fake %d" % fake.vocab_size).hexdigest(),
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def run(self, plan: StepPlan) -> StepResult:
        started = time.monotonic()
        for slot in plan.fresh_slots:
            self._shadows[slot] = None
        if len({row.sequence.slot for row in plan.rows}) < len(plan.rows):
            raise BrokenPlan("two rows share a slot")
        result = StepResult(tuple([self._row(row) for row in plan.rows]))
        if self._fake.step_time:
            time.sleep(max(0.0, started + self._fake.step_time - time.monotonic()))
        return result

    def set_optimization(self, name: str, enabled: bool) -> None:
        raise Unsupported(f"the fake engine has no optimisation {name!r}")

    def close(self) -> None:
        pass

    def _row(self, row: Row) -> RowResult | None:
        sequence = row.sequence
        shadow = self._checked(row)
        end = row.start + row.count
        digest = shadow.digest
        for token_id in sequence.token_ids[shadow.digested : end]:
            digest = (digest * _FACTOR + token_id + 1) & _MASK
        shadow.digest, shadow.digested = digest, end
        if not row.sample:
            self._write(shadow, end)
            return None
        request = sequence.request
        if self._fake.faults and request.token_ids[0] == 0 and not self._healthy(sequence):
            return RowResult(())
        count = min(self._fake.tokens_per_step, len(sequence.pages) * PAGE_SIZE - end + 1)
        self._write(shadow, end + count - 1)
        return self._draw(shadow, count)

    def _checked(self, row: Row) -> _Shadow:
        """The shadow of a row that is fit to be computed."""
        sequence, end = row.sequence, row.start + row.count
        if sequence.slot not in self._shadows or sequence.slot >= self._info.max_sequences:
            raise BrokenPlan(f"slot {sequence.slot} was never announced")
        shadow = self._shadows[sequence.slot]
        if shadow is None:
            shadow = self._shadows[sequence.slot] = _Shadow(sequence)
        if shadow.sequence is not sequence:
            raise BrokenPlan("a slot changed hands untold")
        if row.start != shadow.computed:
            raise BrokenPlan(f"{shadow.computed} tokens were computed, the row begins at {row.start}")
        if shadow.overwritten or sequence.pages[: len(shadow.pages)] != shadow.pages:
            raise BrokenPlan("pages were lost")
        if row.count < 1 or end > len(sequence.pages) * PAGE_SIZE or end > len(sequence.token_ids):
            raise BrokenPlan(f"no pages or no tokens for {row.start}…{end}")
        if row.sample != (end == len(sequence.token_ids)):
            raise BrokenPlan("a row samples behind the last token, and only there")
        return shadow

    def _write(self, shadow: _Shadow, end: int) -> None:
        """Marks the pages of computed … end - 1 as this sequence's."""
        pages = shadow.sequence.pages
        for page in pages[shadow.computed // PAGE_SIZE : -(-end // PAGE_SIZE)]:
            writer = self._writers[page]
            if writer is not shadow:
                if writer is not None:
                    writer.overwritten = True
                self._writers[page] = shadow
        if end > len(shadow.pages) * PAGE_SIZE:
            shadow.pages = pages[: -(-end // PAGE_SIZE)]
        shadow.computed = end

    def _draw(self, shadow: _Shadow, count: int) -> RowResult:
        request = shadow.sequence.request
        output = shadow.sequence.output_length
        noise = request.sampling.seed * _FACTOR if request.sampling.temperature else 0
        ids, logprobs = [], []
        for index in range(output, output + count):
            bits = (shadow.digest ^ noise) & _MASK
            bits = (bits ^ (bits >> 33)) * _FACTOR & _MASK
            bits ^= bits >> 29
            token_id = self._choose(request, index, bits)
            shadow.digest = (shadow.digest * _FACTOR + token_id + 1) & _MASK
            ids.append(token_id)
            if request.logprobs is not None:
                logprobs.append(self._logprob(token_id, request.logprobs, bits))
        shadow.digested += count
        return RowResult(tuple(ids), tuple(logprobs))

    def _choose(self, request: GenerationRequest, index: int, bits: int) -> int:
        stops = request.stopping.stop_token_ids
        place = (bits >> 8) % len(self._ids)
        if not stops:
            return self._ids[place]
        if index >= request.stopping.min_tokens:
            return stops[0] if bits % _EOS_ODDS == 0 else self._ids[place]
        turned = (self._ids[place - offset] for offset in range(len(self._ids)))
        return next((token_id for token_id in turned if token_id not in stops), self._ids[place])

    def _logprob(self, token_id: int, count: int, bits: int) -> TokenLogprob:
        logprob = -(1 + bits % 128) / 64
        others = [other for other in self._ids[: count + 1] if other != token_id]
        top = [token_id, *others][:count]
        return TokenLogprob(logprob, tuple((other, logprob - rank / 8) for rank, other in enumerate(top)))

    def _healthy(self, sequence: Sequence) -> bool:
        """Breaks as the prompt says; False where only this row is to break."""
        fault, after = (*sequence.request.token_ids[1:3], 0, 0)[:2]
        if sequence.output_length < after:
            return True
        match fault:
            case Fault.RAISE:
                raise EngineFailed("as asked")
            case Fault.DEVICE:
                raise AcceleratorError("as asked")
            case Fault.CRASH:
                os.kill(os.getpid(), signal.SIGKILL)
            case Fault.HANG:
                while True:
                    time.sleep(3600)
        return fault != Fault.SICK_ROW


class BrokenPlan(Exception):
    """The scheduler asked for what cannot be computed right."""


class AcceleratorError(RuntimeError):
    """Named as torch names the loss of a device."""
