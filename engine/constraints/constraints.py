"""What the sequences of a runner may say next. Grammars are followed in processes of their own
(docs/adr/0062-constraints-in-processes.md), which the library may use up or bring down; the engine loop asks them, and
waits for none of them longer than a moment, and only where their caller's masks have come in time so far.

Who has no mask yet is not planned (`ready`). A row that was planned and has none when its token is chosen brings
RowEnd.LATE, and is planned again later.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from engine.api import Constraint
from engine.constraints.budget import DISTRUST, MOST_DEATHS, PARKED, REFUSED_FOR, Budget
from engine.constraints.following import MOST_FORCED as MOST_FORCED
from engine.constraints.grammars import Grammars
from engine.constraints.inline import Inline
from engine.constraints.messages import (
    Advance,
    Answer,
    Begin,
    End,
    Failed,
    Followed,
    Gone,
    LookAhead,
    Masked,
    MaskedAhead,
    TakeBack,
)
from engine.constraints.processes import Process, Processes
from engine.constraints.reasons import Reason
from engine.cores import usable_cores
from engine.errors import EngineFailed
from engine.scheduling.plan import Admitted, Row, RowEnd, RowResult, StepPlan
from engine.scheduling.sequence_state import SequenceState

_log = logging.getLogger(__name__)
_MOST_SHARES = 4  # processes of one caller
_MOST_PARKED = 256  # sequences
_MOST_REFUSED = 1024  # grammars
_TIDY = 1.0  # seconds between two looks at what is kept
_MASK_POLL = 0.05  # seconds
_LEAST_WAIT = 1e-4  # seconds; less is none


@dataclass(slots=True, eq=False)
class _Held:
    """A sequence with a constraint."""

    number: int  # its name towards its process; never used again, so that no answer is taken for another's
    constraint: Constraint
    stops: tuple[int, ...]
    forcing: bool  # whether what has no choice is appended without a step
    ids: list[int]  # of the answer, as its process was told
    process: Process | None  # None: there can be none
    masked: int = -1  # `mask` is of the token behind so many
    mask: bytearray = field(default_factory=bytearray)
    whole: bool = False  # the answer may end here
    ahead: dict[tuple[int, ...], bytearray] = field(default_factory=dict)  # of the token behind a draft
    asked_ahead: set[tuple[int, ...]] = field(default_factory=set)
    followed: Followed | None = None  # the answer to the last Advance
    failed: Reason | None = None
    overdue: bool = False  # nobody waits for `followed` any more
    late: bool = False  # the last mask that was wanted was not there
    parked_at: float | None = None  # when it gave up its slot


class Constraints:
    """The grammars of the sequences that a runner holds. Its methods are the engine loop's."""

    def __init__(
        self,
        folder: str = "",
        budget: Budget | None = None,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,  # followed in this very process
    ) -> None:
        shares = max(1, min(_MOST_SHARES, usable_cores() - 1))
        self._budget = budget or replace(Budget(), shares=shares)
        self._clock = clock
        self._processes: Processes | Inline
        if grammars is None:
            self._processes = Processes(folder, self._budget, self, clock)
        else:
            self._processes = Inline(grammars, self)
        self._held: dict[int, _Held] = {}  # by the sequence's key
        self._by_number: dict[int, _Held] = {}
        self._numbers = itertools.count(1)
        self._followed: set[int] = set()  # in this step
        self._waited = 0.0  # seconds, in this step
        self._late_at: dict[str, float] = {}  # by caller: when a mask of its was last late
        self._deaths: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # by caller and grammar; the last one last
        self._tidied_at = clock()

    # What the loop asks for, outside of steps

    def begin_compiling(self, key: int, constraint: Constraint, stops: tuple[int, ...], forcing: bool) -> None:
        """Has the grammar compiled, and its first mask made. `compiled` says when."""
        self._begin(key, constraint, stops, forcing, [])

    def compiled(self, key: int) -> bool:
        """Whether the sequence can be planned, or ended: see `failure`."""
        if self._processes.unloadable and key in self._held:
            self._held[key].failed = Reason.UNMET
        return self._is_ready(self._held[key])

    def failure(self, key: int) -> Reason | None:
        """Why it can never run."""
        return self._held[key].failed

    @property
    def unloadable(self) -> str:
        """Why there can be no constraints with this model; empty where there can."""
        return self._processes.unloadable

    @property
    def busy(self) -> bool:
        """Whether some sequence waits for its mask."""
        return any(not self._is_ready(held) for held in self._held.values())

    @property
    def kept(self) -> bool:
        """Whether `collect` is to be called about every second, so that memory is given back."""
        return bool(self._processes.live)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the process that the others are children of."""
        return self._processes.pids if isinstance(self._processes, Processes) else ()

    def forget(self, key: int) -> None:
        """The sequence has gone."""
        held = self._held.pop(key, None)
        if held is not None:
            self._leave(held)

    def collect(self) -> None:
        """Takes in what the processes have said. Waits for nothing."""
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

    # What the scheduler asks for

    def ready(self, key: int) -> bool:
        """Whether a step that chooses the sequence's next token need not wait for its mask, or hardly."""
        held = self._held.get(key)
        return held is None or self._is_ready(held) or self._trusted(held)

    # What a step asks for

    def begin(self, plan: StepPlan) -> None:
        """Takes in who gave up a slot and who got one."""
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
        """Whether that sequence has a constraint."""
        return key in self._held

    def mask(self, key: int, assumed: Sequence[int] = ()) -> bytearray:
        """One bit for each token that may come next, from the lowest bit of the first byte on; `assumed`: next but for
        these. None may where these may not come, or end it; and where the mask does not come in time."""
        held = self._held[key]
        before = tuple(assumed)
        if before:
            return self._mask_behind(held, before)
        held.late = not self._awaited(held, lambda: self._is_ready(held))
        if held.late or held.failed is not None:
            return self._blank()
        return held.mask

    def expect(self, key: int, draft: Sequence[int]) -> None:
        """Lets the masks be made that a draft is verified with."""
        held = self._held.get(key)
        if held is not None and draft and held.failed is None and self._trusted(held):
            self._ask_ahead(held, tuple(draft))

    def stuck(self, key: int) -> RowResult:
        """Ends a sequence for which no token is left, well where its grammar may end here. One whose mask was only late
        is not ended."""
        held = self._held[key]
        if held.late:
            held.late = False
            return RowResult((), end=RowEnd.LATE)
        if held.failed not in (None, Reason.UNMET):
            return RowResult((), end=RowEnd.COSTLY)
        sound = held.failed is None and held.whole
        return RowResult((), end=RowEnd.COMPLETE if sound else RowEnd.STUCK)

    def ended(self, results: dict[int, RowResult], sequences: Iterable[SequenceState]) -> dict[int, RowResult]:
        """Says of each result that has no token, and was chosen within a mask, for what reason: because none is left,
        or because the logits were no numbers."""
        for one in sequences:
            if one.key not in self._held or results[one.key].token_ids:
                continue
            if self._held[one.key].late or not self._any_left(one):
                results[one.key] = self.stuck(one.key)
        return results

    def follow(self, rows: Iterable[Row], results: dict[int, RowResult]) -> dict[int, RowResult]:
        """Takes in what a step brought; returns the same, with what the grammars force behind it. Rows count once a
        step."""
        if not self._held:
            return results
        going: list[int] = []
        for row in rows:
            held = self._held.get(row.key)
            if held is None or not row.sample or row.key in self._followed or not results[row.key].token_ids:
                continue
            self._followed.add(row.key)
            if results[row.key].token_ids[-1] not in held.stops:  # else it ends, whatever the grammar thinks of it
                self._advance(held, results[row.key].token_ids)
                going.append(row.key)
        for key in going:
            results[key] = self._with_forced(self._held[key], results[key])
        return results

    def close(self) -> None:
        """Ends the processes."""
        self._processes.close()
        self._held.clear()
        self._by_number.clear()

    # What the processes say

    def on_answer(self, process: Process, answer: Answer) -> None:
        """See `processes.Listener`."""
        held = self._by_number.get(answer.key)
        if held is None or held.process is not process:
            return
        match answer:
            case Followed() if held.overdue:  # what was forced is chosen step by step: its masks have nothing else
                held.overdue = False
                if answer.forced:
                    self._processes.ask(process, TakeBack(answer.key, len(answer.forced)))
            case Followed():
                held.followed = answer
            case Masked(length=length, mask=mask, whole=whole):
                held.masked, held.mask, held.whole = length, bytearray(mask), whole
            case MaskedAhead(length=length, draft=draft, masks=masks) if length == len(held.ids):
                for size, mask in enumerate(masks, start=1):
                    held.ahead[draft[:size]] = bytearray(mask) or self._blank()
            case Failed(reason=reason):
                self._fail(held, Reason(reason))
            case Gone() | MaskedAhead():
                pass

    def on_end(self, process: Process, culprit: int | None, reason: Reason) -> None:
        """See `processes.Listener`."""
        for key, held in [*self._held.items()]:
            if held.process is not process or held.failed is not None:
                continue
            if held.number == culprit or (culprit is None and reason is Reason.MEMORY):
                self._fail(held, reason)
                continue
            self._begin(key, held.constraint, held.stops, held.forcing, held.ids, parked_at=held.parked_at)

    def _fail(self, held: _Held, reason: Reason) -> None:
        held.failed = reason
        if reason is Reason.UNMET:
            return
        name = _name(held.constraint)
        count, _ = self._deaths.pop(name, (0, 0.0))
        self._deaths[name] = count + 1, self._clock()
        if len(self._deaths) > _MOST_REFUSED:
            self._deaths.popitem(last=False)
        _log.warning("a constraint is too costly (%s), for the %d. time", reason, count + 1)

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
        refused = started and self._refused(constraint)
        process = self._processes.of(constraint.owner) if started and not refused else None
        number = next(self._numbers)
        held = self._held[key] = self._by_number[number] = _Held(
            number, constraint, stops, forcing, [*ids], process, parked_at=parked_at
        )
        if process is None:
            held.failed = Reason.REFUSED if refused else Reason.UNMET
            return
        process.keys.add(number)
        self._processes.ask(process, Begin(number, constraint.grammar, tuple(ids), stops))

    def _refused(self, constraint: Constraint) -> bool:
        while self._deaths and next(iter(self._deaths.values()))[1] + REFUSED_FOR <= self._clock():
            self._deaths.popitem(last=False)
        count, _ = self._deaths.get(_name(constraint), (0, 0.0))
        return count >= MOST_DEATHS

    def _admit(self, admitted: Admitted, constraint: Constraint) -> None:
        said = list(admitted.token_ids[admitted.prompt_length :])
        forcing = admitted.logprobs is None  # a log-probability is computed in a step
        held = self._held.get(admitted.key)
        if (
            held is not None
            and held.constraint == constraint
            and held.stops == admitted.stopping.stop_token_ids
            and held.ids == said
        ):
            held.parked_at, held.forcing = None, forcing
            return
        self._begin(admitted.key, constraint, admitted.stopping.stop_token_ids, forcing, said)

    def _unpark(self, which: Callable[[_Held], bool]) -> None:
        """Forgets sequences without a slot. They begin anew when they get one."""
        for key in [key for key, held in self._held.items() if which(held)]:
            self.forget(key)

    def _leave(self, held: _Held) -> None:
        del self._by_number[held.number]
        if held.process is not None and held.number in held.process.keys:
            self._processes.leave(held.process, held.number)
            if not held.process.closed:
                self._processes.ask(held.process, End(held.number))

    # Masks

    def _is_ready(self, held: _Held) -> bool:
        return held.failed is not None or held.masked == len(held.ids)

    def _trusted(self, held: _Held) -> bool:
        late_at = self._late_at.get(held.constraint.owner)
        return late_at is None or self._clock() - late_at >= DISTRUST

    def _awaited(self, held: _Held, there: Callable[[], bool]) -> bool:
        """Waits until it is there, while its caller is trusted and the step has time left. Whether it is."""
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

    def _mask_behind(self, held: _Held, before: tuple[int, ...]) -> bytearray:
        if held.failed is not None:
            return self._blank()
        if before not in held.ahead:
            self._ask_ahead(held, before)
        if not self._awaited(held, lambda: before in held.ahead or held.failed is not None):
            return self._blank()
        return held.ahead.get(before) or self._blank()

    def _ask_ahead(self, held: _Held, draft: tuple[int, ...]) -> None:
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

    def _advance(self, held: _Held, ids: tuple[int, ...]) -> None:
        held.followed = None
        held.ahead.clear()
        held.asked_ahead.clear()
        held.ids += ids
        if held.failed is None and held.process is not None:
            self._processes.ask(held.process, Advance(held.number, ids, held.forcing and self._trusted(held)))

    def _with_forced(self, held: _Held, brought: RowResult) -> RowResult:
        """With what its grammar forces behind it, if that is known in time."""
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
    """Without these."""
    left = bytearray(mask)
    for token in tokens:
        if token // 8 < len(left):
            left[token // 8] &= ~(1 << token % 8)
    return left
