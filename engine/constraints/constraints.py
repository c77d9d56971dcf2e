"""Tracks which tokens the sequences of a runner may generate next.

Grammars are followed in processes of their own (docs/adr/0062-constraints-in-processes.md), because llguidance may
exhaust or crash its process. A step waits for their answers for `Budget.step_wait` at most, and only for callers whose
masks came in time lately. Sequences of others are not planned without a mask (`ready`). A planned row whose mask is
late ends in RowEnd.LATE, and is planned again.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from engine.api import Constraint
from engine.constraints.budget import DISTRUST, PARKED, Budget
from engine.constraints.deaths import Deaths
from engine.constraints.following import MOST_FORCED as MOST_FORCED
from engine.constraints.grammars import Grammars
from engine.constraints.inline import Inline
from engine.constraints.messages import (
    Advance,
    Advanced,
    Answer,
    Begin,
    End,
    Failed,
    LookAhead,
    Masked,
    MaskedAhead,
    SequenceEnded,
    TakeBack,
)
from engine.constraints.processes import ConstraintProcess, Processes
from engine.constraints.reasons import ConstraintReason
from engine.cores import usable_cores
from engine.errors import EngineFailed
from engine.scheduling.plan import Admitted, Row, RowEnd, RowResult, StepPlan
from engine.scheduling.sequence_state import SequenceState

_log = logging.getLogger(__name__)
_MOST_SHARES = 4  # processes of one caller
_MOST_PARKED = 256  # sequences
_TIDY = 1.0  # seconds between two searches for what is idle
_MASK_POLL = 0.05  # seconds
_LEAST_WAIT = 1e-4  # seconds; a shorter wait is not worth a call


@dataclass(slots=True, eq=False)
class _HeldConstraint:
    number: int  # names the sequence to its process; never reused, so that no answer is taken for another's
    constraint: Constraint
    stops: tuple[int, ...]
    forcing: bool  # whether tokens that the grammar forces are appended without a step
    ids: list[int]  # of the answer, as they were sent to its process
    process: ConstraintProcess | None  # None: no constraint can be used, or this one is refused
    masked: int = -1  # number of answer tokens before the one that `mask` is for
    mask: bytearray = field(default_factory=bytearray)
    whole: bool = False  # the answer may end here
    ahead: dict[tuple[int, ...], bytearray] = field(default_factory=dict)  # by draft: the mask of the token after it
    asked_ahead: set[tuple[int, ...]] = field(default_factory=set)
    followed: Advanced | None = None  # the answer to the last Advance
    failed: ConstraintReason | None = None
    overdue: bool = False  # the last wait for `followed` was given up
    late: bool = False  # the last mask that a step wanted did not come in time
    parked_at: float | None = None  # when the sequence gave up its slot


class Constraints:
    """Belongs to the engine loop's thread."""

    def __init__(
        self,
        folder: str = "",
        budget: Budget | None = None,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,  # where given, grammars are followed in this process
    ) -> None:
        shares = max(1, min(_MOST_SHARES, usable_cores() - 1))
        self._budget = budget or replace(Budget(), shares=shares)
        self._clock = clock
        self._processes: Processes | Inline
        if grammars is None:
            self._processes = Processes(folder, self._budget, self, clock)
        else:
            self._processes = Inline(grammars, self)
        self._held: dict[int, _HeldConstraint] = {}  # by the sequence's key
        self._by_number: dict[int, _HeldConstraint] = {}
        self._numbers = itertools.count(1)
        self._followed: set[int] = set()  # keys of the sequences advanced in this step
        self._waited = 0.0  # seconds in this step
        self._late_at: dict[str, float] = {}  # by caller: when one of its masks was last late
        self._deaths = Deaths(clock)  # by caller and grammar
        self._tidied_at = clock()

    # Called by the loop, outside of steps

    def begin_compiling(self, key: int, constraint: Constraint, stops: tuple[int, ...], forcing: bool) -> None:
        self._begin(key, constraint, stops, forcing, [])

    def compiled(self, key: int) -> bool:
        """Whether the compile is over; the sequence can be planned unless it is a `failure`."""
        if self._processes.unloadable and key in self._held:
            self._held[key].failed = ConstraintReason.UNMET
        return self._is_ready(self._held[key])

    def failure(self, key: int) -> ConstraintReason | None:
        return self._held[key].failed

    @property
    def unloadable(self) -> str:
        """Why no constraint can be used with this model; empty where constraints can be."""
        return self._processes.unloadable

    @property
    def busy(self) -> bool:
        return any(not self._is_ready(held) for held in self._held.values())

    @property
    def kept(self) -> bool:
        """Whether `collect` must be called about every second, so that idle processes end and free their memory."""
        return bool(self._processes.live)

    @property
    def pids(self) -> tuple[int, ...]:
        return self._processes.pids if isinstance(self._processes, Processes) else ()

    def forget(self, key: int) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._leave(held)

    def collect(self) -> None:
        """Never waits. About once a second, also discards sequences preempted long ago and ends idle processes."""
        if not self._held and not self.kept:
            return
        self._processes.wait(0)
        now = self._clock()
        if now - self._tidied_at < _TIDY:
            return
        self._tidied_at = now
        self._unpark(lambda held: held.parked_at is not None and now - held.parked_at >= PARKED)
        self._processes.tidy()
        self._late_at = {owner: at for owner, at in self._late_at.items() if now - at < DISTRUST}

    # Called by the scheduler

    def ready(self, key: int) -> bool:
        """Whether a step has the mask of the sequence's next token, or may wait briefly for a caller whose masks came
        in time."""
        held = self._held.get(key)
        return held is None or self._is_ready(held) or self._trusted(held)

    # Called by a step

    def begin(self, plan: StepPlan) -> None:
        """Parks grammars of preempted sequences, and begins or resumes those of admitted ones."""
        self._followed.clear()
        self._waited = 0.0
        if not plan.released and not plan.admitted:
            return
        for released in plan.released:
            held = self._held.get(released.key)
            if held is not None:
                held.parked_at = self._clock()
        for admitted in plan.admitted:
            if admitted.constraint is not None:
                self._admit(admitted, admitted.constraint)
            else:
                self.forget(admitted.key)
        parked = sum(held.parked_at is not None for held in self._held.values())
        if parked > _MOST_PARKED:
            self._unpark(lambda held: held.parked_at is not None)

    def constrained(self, key: int) -> bool:
        return key in self._held

    def mask(self, key: int, assumed: Sequence[int] = ()) -> bytearray:
        """One bit for each token that may follow the draft `assumed`, lowest bit first. None is set where the grammar
        forbids `assumed` or ends with it, or the mask is late."""
        held = self._held[key]
        before = tuple(assumed)
        if before:
            return self._mask_behind(held, before)
        held.late = not self._awaited(held, lambda: self._is_ready(held))
        if held.late or held.failed is not None:
            return self._blank()
        return held.mask

    def expect(self, key: int, draft: Sequence[int]) -> None:
        """Requests the masks of a draft ahead of their use."""
        held = self._held.get(key)
        if held is not None and draft and held.failed is None and self._trusted(held):
            self._ask_ahead(held, tuple(draft))

    def stuck(self, key: int) -> RowResult:
        """COMPLETE where the grammar may end, otherwise STUCK or COSTLY. A late mask does not end the sequence
        (LATE)."""
        held = self._held[key]
        if held.late:
            held.late = False
            return RowResult((), end=RowEnd.LATE)
        if held.failed not in (None, ConstraintReason.UNMET):
            return RowResult((), end=RowEnd.COSTLY)
        sound = held.failed is None and held.whole
        return RowResult((), end=RowEnd.COMPLETE if sound else RowEnd.STUCK)

    def ended(self, results: dict[int, RowResult], sequences: Iterable[SequenceState]) -> dict[int, RowResult]:
        """Replaces constrained results without a token by an end, where the mask was late or had no token left. Others
        stay: their logits were not numbers."""
        for one in sequences:
            if one.key not in self._held or results[one.key].token_ids:
                continue
            if self._held[one.key].late or not self._any_left(one):
                results[one.key] = self.stuck(one.key)
        return results

    def follow(self, rows: Iterable[Row], results: dict[int, RowResult]) -> dict[int, RowResult]:
        """Advances the grammars by the step's tokens and adds those that they force. Skips rows advanced earlier in the
        step."""
        if not self._held:
            return results
        going: list[int] = []
        for row in rows:
            held = self._held.get(row.key)
            if held is None or not row.sample or row.key in self._followed or not results[row.key].token_ids:
                continue
            self._followed.add(row.key)
            if results[row.key].token_ids[-1] not in held.stops:  # a stop token ends the sequence
                self._advance(held, results[row.key].token_ids)
                going.append(row.key)
        for key in going:
            results[key] = self._with_forced(self._held[key], results[key])
        return results

    def close(self) -> None:
        self._processes.close()
        self._held.clear()
        self._by_number.clear()

    # Called by the processes

    def on_answer(self, process: ConstraintProcess, answer: Answer) -> None:
        held = self._by_number.get(answer.key)
        if held is None or held.process is not process:
            return
        match answer:
            case Advanced() if held.overdue:  # steps choose the forced tokens: their masks allow no others
                held.overdue = False
                if answer.forced:
                    self._processes.ask(process, TakeBack(answer.key, len(answer.forced)))
            case Advanced():
                held.followed = answer
            case Masked(length=length, mask=mask, whole=whole):
                held.masked, held.mask, held.whole = length, bytearray(mask), whole
            case MaskedAhead(length=length, draft=draft, masks=masks) if length == len(held.ids):
                for size, mask in enumerate(masks, start=1):
                    held.ahead[draft[:size]] = bytearray(mask) or self._blank()
            case Failed(reason=reason):
                self._fail(held, ConstraintReason(reason))
            case SequenceEnded() | MaskedAhead():
                pass

    def on_end(self, process: ConstraintProcess, culprit: int | None, reason: ConstraintReason) -> None:
        """Begins sequences that are not to blame anew in another process."""
        for key, held in [*self._held.items()]:
            if held.process is not process or held.failed is not None:
                continue
            if held.number == culprit or (culprit is None and reason is ConstraintReason.MEMORY):
                self._fail(held, reason)
                continue
            self._begin(key, held.constraint, held.stops, held.forcing, held.ids, parked_at=held.parked_at)

    def _fail(self, held: _HeldConstraint, reason: ConstraintReason) -> None:
        counted = any(
            other.process is held.process and other.failed is reason and other.constraint == held.constraint
            for other in self._held.values()
        )
        held.failed = reason
        # Sequences of one process that follow one grammar fail together.
        if reason is ConstraintReason.UNMET or counted:
            return
        count = self._deaths.add(_name(held.constraint))
        _log.warning("a constraint costs too much (%s); count of such failures: %d", reason, count)

    # Sequences

    def _begin(
        self,
        key: int,
        constraint: Constraint,
        stops: tuple[int, ...],
        forcing: bool,
        ids: list[int],
        parked_at: float | None = None,
    ) -> None:
        self.forget(key)
        started = self._processes.start()
        refused = started and self._deaths.refused(_name(constraint))
        process = self._processes.of(constraint.owner) if started and not refused else None
        number = next(self._numbers)
        held = self._held[key] = self._by_number[number] = _HeldConstraint(
            number, constraint, stops, forcing, [*ids], process, parked_at=parked_at
        )
        if process is None:
            held.failed = ConstraintReason.REFUSED if refused else ConstraintReason.UNMET
            return
        process.keys.add(number)
        self._processes.ask(process, Begin(number, constraint.grammar, tuple(ids), stops))

    def _admit(self, admitted: Admitted, constraint: Constraint) -> None:
        answer = list(admitted.token_ids[admitted.prompt_length :])
        forcing = admitted.logprobs is None  # only a step computes log-probabilities
        held = self._held.get(admitted.key)
        if (
            held is not None
            and held.constraint == constraint
            and held.stops == admitted.stopping.stop_token_ids
            and held.ids == answer
        ):
            held.parked_at, held.forcing = None, forcing
            return
        self._begin(admitted.key, constraint, admitted.stopping.stop_token_ids, forcing, answer)

    def _unpark(self, which: Callable[[_HeldConstraint], bool]) -> None:
        for key in [key for key, held in self._held.items() if which(held)]:
            self.forget(key)

    def _leave(self, held: _HeldConstraint) -> None:
        del self._by_number[held.number]
        if held.process is not None and held.number in held.process.keys:
            self._processes.leave(held.process, held.number)
            if not held.process.closed:
                self._processes.ask(held.process, End(held.number))

    # Masks

    def _is_ready(self, held: _HeldConstraint) -> bool:
        return held.failed is not None or held.masked == len(held.ids)

    def _trusted(self, held: _HeldConstraint) -> bool:
        late_at = self._late_at.get(held.constraint.owner)
        return late_at is None or self._clock() - late_at >= DISTRUST

    def _awaited(self, held: _HeldConstraint, there: Callable[[], bool]) -> bool:
        """Waits only while the caller is trusted and the step has waiting time left."""
        if not there():
            self._processes.wait(0)
        while not there():
            if not self._trusted(held):
                return False
            left = self._budget.step_wait - self._waited
            if left < _LEAST_WAIT:
                self._late_at[held.constraint.owner] = self._clock()
                return False
            begun = self._clock()
            self._processes.wait(min(left, _MASK_POLL))
            self._waited += self._clock() - begun
        return True

    def _mask_behind(self, held: _HeldConstraint, before: tuple[int, ...]) -> bytearray:
        if held.failed is not None:
            return self._blank()
        if before not in held.ahead:
            self._ask_ahead(held, before)
        if not self._awaited(held, lambda: before in held.ahead or held.failed is not None):
            return self._blank()
        return held.ahead.get(before) or self._blank()

    def _ask_ahead(self, held: _HeldConstraint, draft: tuple[int, ...]) -> None:
        if draft not in held.ahead and draft not in held.asked_ahead:
            held.asked_ahead.update(draft[:size] for size in range(1, len(draft) + 1))
            if held.process is not None:
                self._processes.ask(held.process, LookAhead(held.number, draft))

    def _blank(self) -> bytearray:
        if not self._processes.mask_bytes:
            raise EngineFailed("a mask is wanted before the vocabulary is loaded")
        return bytearray(self._processes.mask_bytes)

    def _any_left(self, sequence: SequenceState) -> bool:
        mask = self.mask(sequence.key)
        if sequence.stopping.min_tokens > sequence.output_length:
            mask = _barred(mask, sequence.stopping.stop_token_ids)
        return any(mask)

    def _advance(self, held: _HeldConstraint, ids: tuple[int, ...]) -> None:
        held.followed = None
        held.ahead.clear()
        held.asked_ahead.clear()
        held.ids += ids
        if held.failed is None and held.process is not None:
            self._processes.ask(held.process, Advance(held.number, ids, held.forcing and self._trusted(held)))

    def _with_forced(self, held: _HeldConstraint, brought: RowResult) -> RowResult:
        """Adds the tokens that the grammar forces, if the process answers in time."""
        self._awaited(held, lambda: held.followed is not None or held.failed is not None)
        if held.followed is None:
            held.overdue = held.failed is None
            return brought
        if not held.followed.allowed:
            return RowResult((), end=RowEnd.STUCK)
        forced = held.followed.forced
        held.ids += forced
        end = RowEnd.COMPLETE if held.followed.over else None
        if not forced and end is None:
            return brought
        proposed, accepted = brought.draft_proposed, brought.draft_accepted
        return RowResult((*brought.token_ids, *forced), brought.logprobs, proposed, accepted, len(forced), end)


def _name(constraint: Constraint) -> bytes:
    owner = len(constraint.owner).to_bytes(4, "big") + constraint.owner.encode()
    return hashlib.blake2b(owner + constraint.grammar.encode(), digest_size=16).digest()


def _barred(mask: bytearray, tokens: Iterable[int]) -> bytearray:
    left = bytearray(mask)
    for token in tokens:
        if token // 8 < len(left):
            left[token // 8] &= ~(1 << token % 8)
    return left
