"""Decides which sequences a step feeds and how far, and applies the step's results. Owns the live sequences; `slots`
decides which of them run."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import asdict
from typing import Protocol

from engine.api import EngineLoad, FinishReason, Priority
from engine.ipc.events import Event, Failure
from engine.kv.page_pool import PagePool
from engine.kv.prefix_index import PrefixIndex
from engine.kv.shared_tier import BlockTier
from engine.scheduling.background_throttle import BackgroundThrottle
from engine.scheduling.limits import Limits
from engine.scheduling.ordered import Ordered
from engine.scheduling.outcome import finish, scored_tokens, take
from engine.scheduling.pacing import Pacing
from engine.scheduling.plan import Row, RowEnd, StepPlan, StepResult, WrongResult
from engine.scheduling.rank import timer
from engine.scheduling.rows import row_of
from engine.scheduling.sequence import Sequence
from engine.scheduling.slots import Slots
from engine.scheduling.tally import LoadTally
from engine.scheduling.turns import Turns
from engine.settings import PAGE_SIZE


class Masks(Protocol):
    def ready(self, key: int) -> bool:
        """Whether a step has the mask of the sequence's next token, or needs to wait only briefly."""


_WAITS = 2  # steps in a row that second tokens wait for others' first ones


class Scheduler:
    def __init__(
        self,
        limits: Limits,
        pool: PagePool,
        batching: bool = True,
        prefixes: PrefixIndex | None = None,
        tier: BlockTier | None = None,
        masks: Masks | None = None,  # None: every mask is there when it is wanted
    ) -> None:
        if limits.max_context > pool.total * PAGE_SIZE:
            raise ValueError("one sequence must fit into the page pool")
        self._limits = limits
        self._total_pages = pool.total
        self._prefixes = prefixes or PrefixIndex(pool, enabled=False)
        self._tier = tier
        self._masks = masks
        self._live: dict[int, Sequence] = {}
        self._timers = Ordered()  # (deadline or expiry, key)
        self._turns = Turns(limits.max_batch_tokens)
        self._pacing = Pacing(limits.target_tpot, limits.max_sequences)
        self._slots = Slots(limits, self._prefixes, self._pacing, batching=batching)
        self._throttle = BackgroundThrottle()
        self._interactive = 0  # live sequences of interactive priority
        self._fetching: dict[int, Sequence] = {}
        self._begun: set[int] = set()  # keys of those that were not fed since their prompt ended
        self._waited = 0  # steps in a row that they were left out of
        self._tally = LoadTally()

    # What the front asks for

    def admit(self, sequence: Sequence) -> None:
        """Raises ValueError for a sequence that could never run."""
        request = sequence.request
        if sequence.key in self._live:
            raise ValueError(f"there is a sequence {sequence.key} already")
        if not 0 < len(request.token_ids) < self._limits.max_context:
            raise ValueError(f"{len(request.token_ids)} prompt tokens leave no room in {self._limits.max_context}")
        if request.stopping.max_tokens < (request.prompt_logprobs is None):
            raise ValueError("max_tokens is too low")
        self._live[sequence.key] = sequence
        self._interactive += request.priority == Priority.INTERACTIVE
        self._turns.admitted(sequence)
        if self._tier is not None and self._tier.ask(sequence):
            sequence.fetching = True
            self._fetching[sequence.key] = sequence
        self._slots.enqueue(sequence)
        when = timer(sequence)
        if when is not None:
            self._timers.add(when, sequence.key)

    def cancel(self, key: int) -> None:
        """Also takes sequences that have ended already."""
        sequence = self._live.get(key)
        if sequence is not None:
            self._remove(sequence)

    def pause(self, key: int) -> None:
        """The sequence keeps its pages while no other needs them."""
        sequence = self._live.get(key)
        if sequence is not None and not sequence.paused:
            self._slots.pause(sequence)

    def resume(self, key: int) -> None:
        sequence = self._live.get(key)
        if sequence is not None and sequence.paused:
            self._slots.resume(sequence)

    def set_batching(self, enabled: bool) -> None:
        """Off: one sequence runs at a time. The others give up their pages and wait."""
        self._slots.set_batching(enabled)

    def set_prefix_cache(self, enabled: bool) -> None:
        """Off: every prompt is computed whole, and kept pages are dropped."""
        self._prefixes.set_enabled(enabled)

    # What the loop asks for

    @property
    def fetching(self) -> int:
        """Sequences that wait for the shared tier; if any, `collect` must be called soon."""
        return len(self._fetching)

    def collect(self) -> None:
        """Queues sequences whose keys and values have arrived, or will not."""
        if self._tier is None or not self._fetching:
            return
        for key in self._tier.arrived():
            sequence = self._fetching.pop(key)
            sequence.fetching = False
            self._slots.enqueue(sequence)

    def start_early(self) -> None:
        """Fills a free slot while a step runs, which costs that step nothing."""
        if self._slots.spare:
            self._slots.start_first()

    def expire(self, now: float) -> list[Event]:
        events = []
        while (first := self._timers.first()) is not None and first[0] <= now:
            sequence = self._live[first[1]]
            deadline = sequence.request.deadline
            if deadline is not None and deadline <= now:
                events.append(Event(sequence.key, failure=Failure.DEADLINE))
            else:
                events.append(Event(sequence.key, finish=finish(sequence, FinishReason.TIME_BUDGET, now)))
            self._remove(sequence)
        return events

    def plan(self, now: float) -> StepPlan | None:
        """None where nothing can be fed."""
        self._slots.start_waiting()
        fed, budget = self._to_feed()
        lookahead = self._limits.lookahead_tokens
        rows: list[Row] = []
        begun: list[Sequence] = []
        siblings: set[bytes] = set()  # pages that siblings will begin with
        for sequence in fed:  # lowest rank first, so that no planned row loses its pages
            if sequence.paused or sequence.slot < 0:
                continue
            if sequence.first_token_at is None and self._awaits_sibling(sequence, siblings):
                continue
            start = sequence.computed
            left = len(sequence.token_ids) - start
            count = min(left, budget) if left > 1 else 1
            if not count or (count == left and self._lacks_mask(sequence)):
                continue
            budget -= count if left > 1 else 0
            end = start + count + lookahead
            if end > len(sequence.pages) * PAGE_SIZE and not self._slots.grow(sequence, end):
                continue
            if sequence.first_planned_at is None:
                sequence.first_planned_at = now
            if left == 1 and sequence.key in self._begun:
                begun.append(sequence)
            else:
                rows.append(row_of(sequence, start, count, count == left))
        if begun and not self._wait(begun, rows):
            rows += [row_of(sequence, sequence.computed, 1, True) for sequence in begun]
        if not rows:
            self._pacing.idle()
            self._throttle.away()
            return None
        self._pacing.begin(now)
        return self._slots.planned(rows)

    def _lacks_mask(self, sequence: Sequence) -> bool:
        masks = self._masks
        return masks is not None and sequence.request.constraint is not None and not masks.ready(sequence.key)

    def _to_feed(self) -> tuple[Items[Sequence], int]:
        running, changes = self._slots.running, self._slots.changes
        budget = self._pacing.prompt_tokens(running, self._turns.budget)
        fed = self._turns.next(running)
        if not self._interactive:
            return fed, budget
        return self._throttle.choose(fed, budget, changes if len(fed) == len(running) else None)

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Event]:
        """Raises WrongResult, and applies nothing, where the result does not match the plan."""
        self._check(plan, result)
        self._turns.went_well()
        self._pacing.ended(plan, result, now)
        if self._interactive:
            self._throttle.ended(plan, result, now)
        self._tally.steps += 1
        events = []
        for row in plan.rows:
            sequence = self._live.get(row.key)
            if sequence is None or sequence.slot != row.slot:  # it has ended or lost its pages meanwhile
                continue
            if not row.sample:
                events += self._take_prompt(sequence, row, result)
                continue
            brought = result.rows[row.key]
            event = take(sequence, row, brought, self._limits.max_context, now)
            if brought.end is RowEnd.LATE and not event.prompt_logprobs:  # nothing to report
                continue
            self._tally.take(event)
            self._prefixes.note(sequence)
            if event.start is not None:
                self._tally.begin(sequence)
                if row.count > 1:
                    self._begun.add(sequence.key)
                if self._tier is not None:
                    self._tier.begun(sequence)
            if event.finish is not None or event.failure is not None:
                self._remove(sequence, sound=event.failure is None)
            events.append(event)
        return events

    def _take_prompt(self, sequence: Sequence, row: Row, result: StepResult) -> list[Event]:
        """An event carries the log-probabilities of the prompt, if any."""
        sequence.advance(row.start + row.count)
        self._prefixes.note(sequence)
        if not row.score:
            return []
        return [Event(sequence.key, prompt_logprobs=scored_tokens(sequence, row, result.rows[row.key]))]

    def fail(self, plan: StepPlan) -> list[Event]:
        return [self._fail(sequence, Failure.STEP) for sequence in self._take_back(plan)]

    def raised(self, plan: StepPlan) -> list[Event]:
        """Takes back a step that raised. Its rows are fed again in halves; a row that was alone ends."""
        fed = self._take_back(plan)
        if not self._turns.part(plan.rows):
            return [self._fail(sequence, Failure.STEP) for sequence in fed]
        for sequence in fed:
            self._slots.begin_anew(sequence)
        return []

    def out_of_memory(self, plan: StepPlan) -> list[Event]:
        """Takes back a step that found no memory. Its rows are fed again, fewer at a time; a row that alone finds none,
        time after time, ends."""
        fed = self._take_back(plan)
        if not self._turns.split(plan.rows):
            return [self._fail(sequence, Failure.MEMORY) for sequence in fed]
        for sequence in fed:
            self._slots.begin_anew(sequence)
        return []

    @property
    def repeats(self) -> bool:
        return self._turns.repeats

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def load(self) -> EngineLoad:
        waiting = self._slots.waiting + sum(not sequence.paused for sequence in self._fetching.values())
        return EngineLoad(
            running=len(self._live) - waiting - self._slots.paused,
            waiting=waiting,
            paused=self._slots.paused,
            most_running=self._slots.most_running,
            used_pages=self._prefixes.used,
            kept_pages=self._prefixes.kept,
            total_pages=self._total_pages,
            preemptions=self._slots.preemptions,
            **asdict(self._tally),
        )

    # How steps and sequences end

    def _take_back(self, plan: StepPlan) -> list[Sequence]:
        """Queues again what a failed step was to take in, since the runner may not have. Returns the sequences that
        still hold a slot."""
        self._pacing.idle()
        self._throttle.away()
        self._slots.say_again(plan)
        fed = [self._live.get(row.key) for row in plan.rows]
        return [sequence for sequence in fed if sequence is not None and sequence.slot >= 0]

    def _fail(self, sequence: Sequence, failure: Failure) -> Event:
        self._remove(sequence, sound=False)
        return Event(sequence.key, failure=failure)

    def _check(self, plan: StepPlan, result: StepResult) -> None:
        if result.rows.keys() != {row.key for row in plan.rows if row.sample or row.score}:
            raise WrongResult(
                f"of {len(plan.rows)} rows planned, not those that sample or score came back, but {len(result.rows)}"
            )
        most = self._limits.max_tokens_per_row
        if any(len(brought.token_ids) - brought.forced > most for brought in result.rows.values()):
            raise WrongResult(f"a row returned more than {most} ids")

    def _wait(self, begun: list[Sequence], others: list[Row]) -> bool:
        """Whether sequences whose prompts have just ended wait while others' prompts end: decoding beside them, those
        first tokens would come a decoding step later, and their own second ones no earlier."""
        passes = all(row.count > 1 for row in others)
        ending = [self._live[row.key].request.priority for row in others if row.count > 1 and row.sample]
        own = max(sequence.request.priority for sequence in begun)
        if passes and own <= max(ending, default=-1) and self._waited < _WAITS:
            self._waited += 1
            return True
        self._waited = 0
        self._begun.difference_update(sequence.key for sequence in begun)
        return False

    def _awaits_sibling(self, sequence: Sequence, begun: set[bytes]) -> bool:
        """Takes over shared pages of its prompt. Whether a sibling of lower rank computes its next page in this very
        step; one that finds no room has taken it from this one before."""
        self._prefixes.catch_up(sequence)
        if sequence.request.siblings == 1:
            return False
        page = self._prefixes.next_page(sequence)
        if page is None or page in begun:
            return page is not None
        begun.add(page)
        return False

    def _remove(self, sequence: Sequence, sound: bool = True) -> None:
        del self._live[sequence.key]
        self._interactive -= sequence.request.priority == Priority.INTERACTIVE
        if not self._interactive:
            self._throttle.away()
        self._turns.ended(sequence)
        self._begun.discard(sequence.key)
        when = timer(sequence)
        if when is not None:
            self._timers.discard(when, sequence.key)
        self._slots.remove(sequence, sound=sound)
        if self._fetching.pop(sequence.key, None) is not None and self._tier is not None:
            self._tier.leave(sequence.key)
