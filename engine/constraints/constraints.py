"""What the sequences of a runner may say next. Masks are made in threads while the step computes; the library lets go
of Python's lock meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from engine.constraints.grammars import Grammars
from engine.cores import usable_cores
from engine.scheduling.plan import Admitted, Row, RowEnd, RowResult, StepPlan
from engine.scheduling.sequence_state import SequenceState

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_FORCED: Final = 256  # tokens that are appended at once
_THREADS: Final = 4  # that make masks, where there are cores


@dataclass(slots=True, eq=False)
class _Held:
    """Of a sequence that holds a slot: its grammar, as far as the answer has come."""

    matcher: LLMatcher
    stops: tuple[int, ...]
    forcing: bool  # whether what has no choice is appended without a step
    making: Future[None] | None = None  # of `mask`
    mask: bytearray = field(default_factory=bytearray)  # of the next token
    ahead: dict[tuple[int, ...], bytearray] = field(default_factory=dict)  # of the one behind a draft that begins so


class Constraints:
    """The grammars of the sequences that a runner holds. Its methods are the engine loop's; work is done in threads
    that come with the first constraint."""

    def __init__(self, folder: str = "") -> None:
        self._grammars = Grammars(folder)
        self._held: dict[int, _Held] = {}  # by the sequence's key
        self._followed: set[int] = set()  # in this step
        self._threads: ThreadPoolExecutor | None = None
        self._most_threads = max(1, min(_THREADS, usable_cores() - 1))

    def compile(self, grammar: str) -> Future[None]:
        """Done once the grammar can be used without delay. Fails where there can be no constraints at all."""
        return self._pool().submit(self._grammars.compile, grammar)

    def begin(self, plan: StepPlan) -> None:
        """Takes in who gave up a slot and who got one, and lets masks be made for the rows that sample."""
        self._followed.clear()
        if plan.released or plan.admitted:
            self._enter(plan)
        if not self._held:
            return
        self._make([self._held[row.key] for row in plan.rows if row.sample and row.key in self._held])

    def constrained(self, key: int) -> bool:
        """Whether that sequence has a constraint."""
        return key in self._held

    def mask(self, key: int, assumed: Sequence[int] = ()) -> bytearray:
        """One bit for each token that may come next, from the lowest bit of the first byte on; `assumed`: next but for
        these. None may where these may not come, or end it. Waits for it."""
        held = self._held[key]
        if held.making is None:
            self._make_now([held])
            held.making = Future()
            held.making.set_result(None)
        held.making.result()
        if not assumed:
            return held.mask
        before = tuple(assumed)
        if before not in held.ahead:
            held.ahead[before] = self._mask_behind(held, before)
        return held.ahead[before]

    def expect(self, key: int, draft: Sequence[int]) -> None:
        """Lets the masks be made that a draft is verified with."""
        held = self._held.get(key)
        if held is not None and draft:
            self._make([held])
            held.making = self._pool().submit(self._make_ahead, held, tuple(draft), held.making)

    def stuck(self, key: int) -> RowResult:
        """Of a sequence for which no token is left: it ends, well where its grammar may end here."""
        matcher = self._held[key].matcher
        sound = not matcher.is_error() and matcher.is_accepting()
        return RowResult((), end=RowEnd.COMPLETE if sound else RowEnd.STUCK)

    def ended(self, results: dict[int, RowResult], sequences: Iterable[SequenceState]) -> dict[int, RowResult]:
        """Results that were chosen within masks; the same, where one has no token told for what reason: because none is
        left, or because the logits were no numbers."""
        for one in sequences:
            if one.key in self._held and not results[one.key].token_ids and not self._any_left(one):
                results[one.key] = self.stuck(one.key)
        return results

    def _any_left(self, sequence: SequenceState) -> bool:
        mask = self.mask(sequence.key)
        if sequence.stopping.min_tokens > sequence.output_length:
            mask = _barred(mask, sequence.stopping.stop_token_ids)
        return any(mask)

    def follow(
        self, rows: Iterable[Row], results: dict[int, RowResult], *, awaited: bool = False
    ) -> dict[int, RowResult]:
        """Takes in what a step brought; the same, with what the grammars force behind it. Rows count once a step.
        `awaited`: the next masks are waited for at once."""
        if not self._held:
            return results
        going = []
        for row in rows:
            held = self._held.get(row.key)
            if row.key in self._followed:
                continue
            if row.sample and held is not None and results[row.key].token_ids:
                self._followed.add(row.key)
                result = results[row.key] = self._follow(held, results[row.key])
                if result.end is None and result.token_ids[-1] not in held.stops:
                    going.append(held)
        if len(going) > 1 or not awaited:
            self._make(going)  # for what these sample next, while their results are taken in
        return results

    def close(self) -> None:
        """Ends the threads."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(cancel_futures=True)

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._most_threads, thread_name_prefix="constraints")
        return self._threads

    def _enter(self, plan: StepPlan) -> None:
        for released in plan.released:
            self._held.pop(released.key, None)
        for admitted in plan.admitted:
            self._held.pop(admitted.key, None)
            if admitted.constraint is not None:
                self._held[admitted.key] = self._begun(admitted, admitted.constraint.grammar)

    def _begun(self, admitted: Admitted, grammar: str) -> _Held:
        matcher = self._grammars.matcher(grammar)
        said = admitted.token_ids[admitted.prompt_length :]
        if said:
            matcher.consume_tokens(list(said))
        forcing = admitted.logprobs is None  # a log-probability is computed in a step
        return _Held(matcher, admitted.stopping.stop_token_ids, forcing)

    def _make(self, wanted: list[_Held]) -> None:
        """Begins to make their masks: a wake-up of a thread may cost more than a mask, so there is one a thread."""
        due = [held for held in wanted if held.making is None]
        parts = min(self._most_threads, len(due))
        for part in range(parts):
            mine = due[part::parts]
            making = self._pool().submit(self._make_now, mine)
            for held in mine:
                held.making = making

    def _make_now(self, part: list[_Held]) -> None:
        for held in part:
            held.mask = self._mask(held)

    def _make_ahead(self, held: _Held, draft: tuple[int, ...], before: Future[None] | None) -> None:
        if before is not None:
            before.result()  # it began earlier, so there is a thread for it
        for size in range(1, len(draft) + 1):
            if draft[:size] in held.ahead:  # by who drafted within the grammar
                continue
            held.ahead[draft[:size]] = self._mask_behind(held, draft[:size])

    def _mask_behind(self, held: _Held, draft: tuple[int, ...]) -> bytearray:
        """Where a token is forced, the library's mask has no other: what would be appended is what is chosen."""
        matcher, consumed, none = held.matcher, 0, bytearray(len(held.mask))
        try:
            for token in draft:
                if token in held.stops or not matcher.try_consume_tokens([token]):
                    return none
                consumed += 1
                if matcher.is_stopped():
                    return none
            return self._mask(held)
        finally:
            if consumed:
                matcher.rollback(consumed)

    def _mask(self, held: _Held) -> bytearray:
        """Stop tokens are allowed where the grammar may end, and nowhere else."""
        matcher = held.matcher
        bits = bytearray(matcher.compute_bitmask())
        if matcher.is_error():
            return bytearray(len(bits))
        end = self._grammars.vocabulary()[1]
        ends = bits[end // 8] >> end % 8 & 1
        bits[end // 8] &= ~(1 << end % 8)
        for token in held.stops:
            if token // 8 < len(bits):
                bits[token // 8] = bits[token // 8] & ~(1 << token % 8) | ends << token % 8
        return bits

    def _follow(self, held: _Held, brought: RowResult) -> RowResult:
        matcher, ids = held.matcher, brought.token_ids
        if held.making is not None:
            held.making.result()  # from here on nobody else is at the matcher
            held.making = None
        held.ahead.clear()
        if ids[-1] in held.stops:  # it ends here, whatever the grammar thinks of this token
            return brought
        if not matcher.consume_tokens(list(ids)):
            return RowResult((), end=RowEnd.STUCK)
        forced: list[int] = []
        if held.forcing and not matcher.is_stopped():
            forced = matcher.compute_ff_tokens()[:MOST_FORCED]
            forced = list(itertools.takewhile(lambda token: token not in held.stops, forced))
        if forced:
            matcher.consume_tokens(forced)
        end = RowEnd.COMPLETE if matcher.is_stopped() and not matcher.is_error() else None
        if not forced and end is None:
            return brought
        proposed, accepted = brought.draft_proposed, brought.draft_accepted
        return RowResult((*ids, *forced), brought.logprobs, proposed, accepted, len(forced), end)


def _barred(mask: bytearray, tokens: Iterable[int]) -> bytearray:
    """Without these."""
    left = bytearray(mask)
    for token in tokens:
        if token // 8 < len(left):
            left[token // 8] &= ~(1 << token % 8)
    return left
