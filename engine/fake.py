"""The engine that needs no torch and no weights: for tests and for measuring what is around it.

Ids are a function of the tokens so far (and of the seed, unless greedy). Up to 256 entries of vocabulary they are
printable ASCII, above that anything but the first three, whole code points or not. About one in 64 is the request's
first stop token, where it has one. Fields of SamplingParams that need logits change nothing, since there are none.

It keeps a shadow of the page pool and refuses a plan that reads what was not computed or was overwritten. A full page
holds a digest of all tokens up to its end, so that a sequence which begins with the work of others is held to it. With
`FakeSettings.faults`, a prompt that begins with (0, fault, n) breaks once n ids have been generated.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
import os
import signal
import struct
import time
from collections.abc import Sequence as Items
from typing import Any

from cache.api import BlockLayout
from engine.api import GenerationRequest, ModelInfo, SamplingParams, Stopping, TokenLogprob
from engine.errors import EngineFailed, Unsupported
from engine.plan import Row, RowResult, StepPlan, StepResult
from engine.sequence import Sequence
from engine.settings import PAGE_SIZE, EngineSettings

_PRIME = 2**31 - 1
_FACTOR = 48271  # of a well-known generator with this modulus
_STOP_ODDS = 64


class Fault(enum.IntEnum):
    """Second token of a prompt that breaks things."""

    RAISE = 1  # the step raises
    SICK_ROW = 2  # this row comes back without ids, as for logits that are not finite
    CRASH = 3  # the process dies
    HANG = 4  # the step never ends
    DEVICE = 5  # the step raises what the loss of a device raises


class _Shadow:
    """What was fed of the sequence that owns a slot."""

    __slots__ = (
        "computed",
        "digest",
        "digested",
        "noise",
        "overwritten",
        "pages",
        "plain",
        "sequence",
        "stamp",
        "written",
    )

    def __init__(self, sequence: Sequence, stamp: int, faults: bool) -> None:
        request = sequence.request
        self.stamp = stamp  # no two have the same
        self.sequence = sequence
        self.computed = 0
        self.pages: list[int] = []  # as of the last row
        self.overwritten = False  # one of them by another sequence
        self.written = 1  # digest of token_ids[:computed]
        self.digest = 1  # of token_ids[:digested]
        self.digested = 0
        self.noise = request.sampling.seed % _PRIME if request.sampling.temperature else 0
        broken = faults and request.token_ids[0] == 0
        self.plain = not request.stopping.stop_token_ids and request.logprobs is None and not broken


def plain_request(token_ids: tuple[int, ...], max_tokens: int = 16, **changes: Any) -> GenerationRequest:
    """A greedy request without stops, of now, for those who try the engine; `changes` are further fields of it."""
    plain = GenerationRequest(
        request_id="",
        token_ids=token_ids,
        sampling=SamplingParams(
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            seed=0,
        ),
        stopping=Stopping(max_tokens=max_tokens),
        arrived_at=time.monotonic(),
    )
    return dataclasses.replace(plain, **changes)


class FakeRunner:
    """Implements engine.plan.Runner."""

    def __init__(self, settings: EngineSettings) -> None:
        fake = settings.fake
        self._fake = fake
        self._shadows: dict[int, _Shadow | None] = {}  # slot → what was fed of its owner; None: nothing yet
        self._stamps = itertools.count(1)
        self._stamped: dict[int, _Shadow] = {}
        self._writers = [0] * fake.total_pages  # stamps
        self._readers: dict[int, list[_Shadow]] = {}  # page → who begins with it without having written it
        self._pages = _FakePages(fake.total_pages)
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
            tokens_per_step=fake.tokens_per_step,
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def pages(self) -> _FakePages:
        return self._pages

    def run(self, plan: StepPlan) -> StepResult:
        started = time.monotonic()
        for slot in plan.fresh_slots:
            old = self._shadows.get(slot)
            if old is not None:
                self._drop(old)
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

    def _drop(self, shadow: _Shadow) -> None:
        del self._stamped[shadow.stamp]
        for page in shadow.pages:
            readers = self._readers.get(page, [])
            if shadow in readers:
                readers.remove(shadow)

    def _row(self, row: Row) -> RowResult | None:
        sequence = row.sequence
        shadow = self._shadows.get(sequence.slot)
        if shadow is None:
            shadow = self._new_shadow(sequence)
        end = row.start + row.count
        self._check(row, shadow, end)
        digest = shadow.digest
        for token_id in sequence.token_ids[shadow.digested : end]:
            digest = (digest * _FACTOR + token_id) % _PRIME
        shadow.digest, shadow.digested = digest, end
        self._write(shadow, sequence.token_ids[shadow.computed : end])
        if not row.sample:
            return None
        if not shadow.plain and self._breaks(sequence):
            return RowResult(())
        count = self._fake.tokens_per_step
        if count > 1:
            count = min(count, len(sequence.pages) * PAGE_SIZE - end + 1)
        result = self._draw(shadow, count)
        if count > 1:
            self._write(shadow, result.token_ids[:-1])
        return result

    def _new_shadow(self, sequence: Sequence) -> _Shadow:
        if sequence.slot not in self._shadows or sequence.slot >= self._info.max_sequences:
            raise BrokenPlan(f"slot {sequence.slot} was never announced")
        shadow = _Shadow(sequence, next(self._stamps), self._fake.faults)
        self._shadows[sequence.slot] = self._stamped[shadow.stamp] = shadow
        return shadow

    def _check(self, row: Row, shadow: _Shadow, end: int) -> None:
        sequence = row.sequence
        pages = sequence.pages
        if shadow.sequence is not sequence:
            raise BrokenPlan("a slot changed hands unannounced")
        if row.start > shadow.computed:
            self._adopt(row, shadow)
        if row.start != shadow.computed:
            raise BrokenPlan(f"{shadow.computed} tokens were computed, the row begins at {row.start}")
        if pages != shadow.pages:
            written = -(-shadow.computed // PAGE_SIZE)
            if pages[:written] != shadow.pages[:written]:
                raise BrokenPlan("computed pages were exchanged")
            shadow.pages = pages.copy()
        if shadow.overwritten:
            raise BrokenPlan("another sequence wrote into computed pages")
        if end == row.start or end > len(pages) * PAGE_SIZE:
            raise BrokenPlan(f"no pages or no tokens for {row.start}…{end}")
        if row.sample != (end == len(sequence.token_ids)):
            raise BrokenPlan("a row samples behind the last token, and only there")

    def _adopt(self, row: Row, shadow: _Shadow) -> None:
        """Begins, or goes on, with full pages that others computed, as far as they are what they must be."""
        if shadow.computed % PAGE_SIZE or row.start % PAGE_SIZE:
            return
        sequence = row.sequence
        for place in range(shadow.computed // PAGE_SIZE, min(row.start // PAGE_SIZE, len(sequence.pages))):
            digest, page = shadow.written, sequence.pages[place]
            for token_id in sequence.token_ids[place * PAGE_SIZE : (place + 1) * PAGE_SIZE]:
                digest = (digest * _FACTOR + token_id) % _PRIME
            if self._pages.full[page] != digest:
                raise BrokenPlan(f"page {page} does not hold what the sequence begins with")
            shadow.written = digest
            shadow.computed += PAGE_SIZE
            shadow.pages[place:] = [page]
            self._readers.setdefault(page, []).append(shadow)

    def _write(self, shadow: _Shadow, token_ids: Items[int]) -> None:
        """Puts these tokens, from the first that was not computed on, into the sequence's pages."""
        pages, writers, full = shadow.pages, self._writers, self._pages.full
        position, digest = shadow.computed, shadow.written
        for token_id in token_ids:
            digest = (digest * _FACTOR + token_id) % _PRIME
            page = pages[position // PAGE_SIZE]
            stamp = writers[page]
            if stamp != shadow.stamp:
                if stamp in self._stamped:
                    self._stamped[stamp].overwritten = True
                writers[page] = shadow.stamp
            for reader in self._readers.pop(page, ()):
                reader.overwritten = True
            position += 1
            full[page] = None if position % PAGE_SIZE else digest
        shadow.computed, shadow.written = position, digest

    def _draw(self, shadow: _Shadow, count: int) -> RowResult:
        digest, ids = shadow.digest, self._ids
        shadow.digested += count
        if shadow.plain and count == 1:
            token_id = ids[(digest ^ shadow.noise) * _FACTOR % _PRIME % len(ids)]
            shadow.digest = (digest * _FACTOR + token_id) % _PRIME
            return RowResult((token_id,))
        request = shadow.sequence.request
        output = shadow.sequence.output_length
        drawn, logprobs = [], []
        for index in range(output, output + count):
            bits = (digest ^ shadow.noise) * _FACTOR % _PRIME
            token_id = self._choose(request, index, bits)
            digest = (digest * _FACTOR + token_id) % _PRIME
            drawn.append(token_id)
            if request.logprobs is not None:
                logprobs.append(self._logprob(token_id, request.logprobs, bits))
        shadow.digest = digest
        return RowResult(tuple(drawn), tuple(logprobs))

    def _choose(self, request: GenerationRequest, index: int, bits: int) -> int:
        """The id at place `index` of the output."""
        stops = request.stopping.stop_token_ids
        place = bits % len(self._ids)
        if not stops:
            return self._ids[place]
        if index >= request.stopping.min_tokens:
            return stops[0] if bits // len(self._ids) % _STOP_ODDS == 0 else self._ids[place]
        turned = (self._ids[place - offset] for offset in range(len(self._ids)))
        return next((token_id for token_id in turned if token_id not in stops), self._ids[place])

    def _logprob(self, token_id: int, count: int, bits: int) -> TokenLogprob:
        logprob = -(1 + bits % 128) / 64
        others = [other for other in self._ids[: count + 1] if other != token_id]
        top = [token_id, *others][:count]
        return TokenLogprob(logprob, tuple((other, logprob - rank / 8) for rank, other in enumerate(top)))

    def _breaks(self, sequence: Sequence) -> bool:
        """Breaks as the prompt says; True where only this row is to break."""
        first, fault, after = (*sequence.request.token_ids[:3], 0, 0)[:3]
        if not self._fake.faults or first != 0 or sequence.output_length < after:
            return False
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
        return fault == Fault.SICK_ROW


class _FakePages:
    """Implements engine.plan.PageAccess: sixteen times a full page's digest."""

    def __init__(self, total: int) -> None:
        self.full: list[int | None] = [None] * total  # digest of all tokens up to a full page's end

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(layers=1, kv_heads=1, head_dim=4, dtype="digest", item_bytes=1, page_size=PAGE_SIZE)

    def buffer(self, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def read(self, pages: Items[int], into: memoryview) -> None:
        digests = [self.full[page] or 0 for page in pages]
        into[:] = b"".join(struct.pack("<Q", digest) * PAGE_SIZE for digest in digests)

    def write(self, pages: Items[int], source: memoryview) -> None:
        size = len(source) // len(pages)
        for at, page in enumerate(pages):
            held = set(struct.unpack(f"<{PAGE_SIZE}Q", source[at * size : (at + 1) * size]))
            self.full[page] = held.pop() if len(held) == 1 else None


class BrokenPlan(Exception):
    """The scheduler asked for what cannot be computed right."""


class AcceleratorError(RuntimeError):
    """Named as torch names the loss of a device."""
