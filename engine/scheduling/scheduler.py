"""Decides which sequences a step feeds and how far, and takes in what the step brought. Owns the live sequences, their
slots and their pages. Torch-free.

All order comes from `rank`. A sequence is running (it has a slot), waiting (it has none), fetching (it has none, and
its prefix is on its way) or parked (it has none, and its reader is behind).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass

from engine.api import EngineLoad, FinishReason, Priority
from engine.ipc.events import Event, Failure
from engine.kv.page_pool import PagePool
from engine.kv.prefix_index import PrefixIndex
from engine.kv.shared_tier import BlockTier
from engine.scheduling.ordered import Ordered
from engine.scheduling.outcome import finish, take, told
from engine.scheduling.pacing import Pacing
from engine.scheduling.plan import Released, Row, StepPlan, StepResult
from engine.scheduling.rank import rank, timer
from engine.scheduling.rows import admission_of, row_of
from engine.scheduling.sequence import PrefixPage, Sequence
from engine.scheduling.tally import Tally
from engine.scheduling.turns import Turns
from engine.scheduling.yielding import Yielding
from engine.settings import PAGE_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a step and a sequence may take."""

    max_sequences: int
    max_batch_tokens: int  # prompt tokens a step
    max_context: int  # tokens a sequence
    lookahead_tokens: int = 0  # how far beyond a row's first new token its pages must reach
    max_tokens_per_row: int = 1  # most ids that a row may bring
    target_tpot: float | None = None  # seconds between two tokens of a stream, at most


class Scheduler:
    """plan → run → commit, with admit, cancel, pause and resume in between."""

    def __init__(
        self,
        limits: Limits,
        pool: PagePool,
        batching: bool = True,
        prefixes: PrefixIndex | None = None,
        tier: BlockTier | None = None,
    ) -> None:
        if limits.max_context > pool.total * PAGE_SIZE:
            raise ValueError("one sequence must fit into the page pool")
        self._limits = limits
        self._total_pages = pool.total
        self._prefixes = prefixes or PrefixIndex(pool, enabled=False)
        self._tier = tier
        self._live: dict[int, Sequence] = {}
        self._running: list[Sequence] = []  # lowest rank first
        self._changes = 0  # of who runs and is not paused
        self._waiting = Ordered()
        self._timers = Ordered()  # (deadline or expiry, key)
        self._free_slots = list(range(limits.max_sequences - 1, -1, -1))
        self._admitted: dict[int, Sequence] = {}  # by slot; in no plan yet
        self._released: list[Released] = []  # likewise
        self._width = limits.max_sequences if batching else 1
        self._turns = Turns(limits.max_batch_tokens)
        self._pacing = Pacing(limits.target_tpot, limits.max_sequences)
        self._yielding = Yielding()
        self._watched = 0  # live sequences of interactive priority
        self._paused = 0
        self._fetching: dict[int, Sequence] = {}
        self._tally = Tally()

    # What the front asks for

    def admit(self, sequence: Sequence) -> None:
        """Takes a new sequence in. ValueError where it could never run."""
        request = sequence.request
        if sequence.key in self._live:
            raise ValueError(f"there is a sequence {sequence.key} already")
        if not 0 < len(request.token_ids) < self._limits.max_context:
            raise ValueError(f"{len(request.token_ids)} prompt tokens leave no room in {self._limits.max_context}")
        if request.stopping.max_tokens < (request.prompt_logprobs is None):
            raise ValueError("max_tokens is too low")
        self._live[sequence.key] = sequence
        self._watched += request.priority == Priority.INTERACTIVE
        self._turns.admitted(sequence)
        if self._tier is not None and self._tier.ask(sequence):
            sequence.fetching = True
            self._fetching[sequence.key] = sequence
        self._enqueue(sequence)
        when = timer(sequence)
        if when is not None:
            self._timers.add(when, sequence.key)

    def cancel(self, key: int) -> None:
        """Forgets a sequence; one that has ended already is no mistake."""
        sequence = self._live.get(key)
        if sequence is not None:
            self._remove(sequence)

    def pause(self, key: int) -> None:
        """Plans it no more until `resume`. It keeps its pages while nobody else wants them."""
        sequence = self._live.get(key)
        if sequence is None or sequence.paused:
            return
        if sequence.slot < 0:
            self._waiting.discard(*rank(sequence))
        sequence.paused = True
        self._paused += 1
        self._changes += 1

    def resume(self, key: int) -> None:
        """Undoes `pause`."""
        sequence = self._live.get(key)
        if sequence is None or not sequence.paused:
            return
        sequence.paused = False
        self._paused -= 1
        self._changes += 1
        self._enqueue(sequence)

    def set_batching(self, enabled: bool) -> None:
        """Off: one sequence runs at a time. The others give up their pages and wait."""
        self._width = self._limits.max_sequences if enabled else 1
        if len(self._running) > self._width:
            kept = next((one for one in self._running if not one.paused), self._running[0])
            for sequence in [one for one in self._running if one is not kept]:
                self._preempt(sequence)

    def set_prefix_cache(self, enabled: bool) -> None:
        """Off: every prompt is computed whole, and what was kept is dropped."""
        self._prefixes.set_enabled(enabled)

    # What the loop asks for

    @property
    def fetching(self) -> int:
        """Sequences that wait for the shared tier; `collect` is to be called soon."""
        return len(self._fetching)

    def collect(self) -> None:
        """Lets those wait for a slot whose keys and values have arrived, or will not."""
        if self._tier is None or not self._fetching:
            return
        for key in self._tier.arrived():
            sequence = self._fetching.pop(key)
            sequence.fetching = False
            self._enqueue(sequence)

    def expire(self, now: float) -> list[Event]:
        """Ends those whose time is up, running or not."""
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
        """The next step; None where nobody can be fed."""
        self._start_waiting()
        fed, budget = self._to_feed()
        lookahead = self._limits.lookahead_tokens
        rows = []
        begun: set[bytes] = set()  # pages that siblings will begin with
        for sequence in fed:  # lowest rank first, so that no planned row loses its pages
            if sequence.paused or sequence.slot < 0:
                continue
            if sequence.first_token_at is None and self._awaits_sibling(sequence, begun):
                continue
            start = sequence.computed
            count = len(sequence.token_ids) - start
            sample = True
            if count > 1:
                if count > budget:
                    count, sample = budget, False
                    if not count:
                        continue
                budget -= count
            end = start + count + lookahead
            if end > len(sequence.pages) * PAGE_SIZE and not self._grow(sequence, end):
                continue
            if sequence.first_planned_at is None:
                sequence.first_planned_at = now
            rows.append(row_of(sequence, start, count, sample))
        if not rows:
            self._pacing.idle()
            self._yielding.away()
            return None
        self._pacing.begin(now)
        return self._plan(rows)

    def _to_feed(self) -> tuple[Items[Sequence], int]:
        """Whom the next step may feed, and how many prompt tokens."""
        budget = self._pacing.prompt_tokens(self._running, self._turns.budget)
        running = self._turns.next(self._running)
        if not self._watched:
            return running, budget
        return self._yielding.choose(running, budget, self._changes if len(running) == len(self._running) else None)

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Event]:
        """Takes in what the step brought. ValueError, and nothing is taken in, where that is not what was planned."""
        self._check(plan, result)
        self._turns.went_well()
        self._pacing.ended(plan, result, now)
        if self._watched:
            self._yielding.ended(plan, result, now)
        self._tally.steps += 1
        events = []
        for row in plan.rows:
            sequence = self._live.get(row.key)
            if sequence is None or sequence.slot != row.slot:  # it has ended or lost its pages meanwhile
                continue
            if not row.sample:
                sequence.advance(row.start + row.count)
                self._prefixes.note(sequence)
                if row.score:
                    scores = told(sequence, row, result.rows[row.key])
                    events.append(Event(sequence.key, prompt_logprobs=scores))
                continue
            event = take(sequence, row, result.rows[row.key], self._limits.max_context, now)
            self._tally.take(event)
            self._prefixes.note(sequence)
            if event.start is not None:
                self._tally.begin(sequence)
                if self._tier is not None:
                    self._tier.begun(sequence)
            if event.finish is not None or event.failure is not None:
                self._remove(sequence, sound=event.failure is None)
            events.append(event)
        return events

    def fail(self, plan: StepPlan) -> list[Event]:
        """Ends all that a broken step was to feed."""
        return [self._fail(sequence, Failure.STEP) for sequence in self._take_back(plan)]

    def out_of_memory(self, plan: StepPlan) -> list[Event]:
        """Takes back a step that found no memory, so that its rows are fed again, fewer at a time. A row that is alone
        and still finds none, time after time, ends."""
        fed = self._take_back(plan)
        if not self._turns.split(plan.rows):
            return [self._fail(sequence, Failure.MEMORY) for sequence in fed]
        for sequence in fed:
            if sequence.slot not in self._admitted:  # begins anew there, behind the full pages that it has
                self._released.append(Released(sequence.key, sequence.slot))
                self._admitted[sequence.slot] = sequence
                sequence.planned_pages = 0
                sequence.computed -= sequence.computed % PAGE_SIZE
        return []

    @property
    def live(self) -> int:
        """Sequences that have not ended."""
        return len(self._live)

    @property
    def load(self) -> EngineLoad:
        """How busy it is now."""
        waiting = len(self._waiting) + sum(not sequence.paused for sequence in self._fetching.values())
        return EngineLoad(
            running=len(self._live) - waiting - self._paused,
            waiting=waiting,
            paused=self._paused,
            most_running=self._most_running,
            used_pages=self._prefixes.used,
            kept_pages=self._prefixes.kept,
            total_pages=self._total_pages,
            **asdict(self._tally),
        )

    # Slots and pages

    def _take_back(self, plan: StepPlan) -> list[Sequence]:
        """Says again what a step that did not come back was to take in, as nobody knows whether the runner did. Whom it
        was to feed and who still holds a slot."""
        self._pacing.idle()
        self._yielding.away()
        self._released = [*plan.released, *self._released]
        for admitted in plan.admitted:
            sequence = self._live.get(admitted.key)
            if sequence is not None and sequence.slot == admitted.slot:
                self._admitted[sequence.slot] = sequence
                sequence.planned_pages = 0
        fed = [self._live.get(row.key) for row in plan.rows]
        return [sequence for sequence in fed if sequence is not None and sequence.slot >= 0]

    def _fail(self, sequence: Sequence, failure: Failure) -> Event:
        self._remove(sequence, sound=False)
        return Event(sequence.key, failure=failure)

    def _plan(self, rows: list[Row]) -> StepPlan:
        if not self._admitted and not self._released:
            return StepPlan(tuple(rows))
        admitted = tuple(admission_of(sequence) for sequence in self._admitted.values())
        released = tuple(self._released)
        self._admitted.clear()
        self._released.clear()
        return StepPlan(tuple(rows), admitted, released)

    def _check(self, plan: StepPlan, result: StepResult) -> None:
        if result.rows.keys() != {row.key for row in plan.rows if row.sample or row.score}:
            raise ValueError(
                f"of {len(plan.rows)} rows planned, not those that sample or score came back, but {len(result.rows)}"
            )
        most = self._limits.max_tokens_per_row
        if any(len(brought.token_ids) - brought.forced > most for brought in result.rows.values()):
            raise ValueError(f"a row brought more than {most} ids")

    def _start_waiting(self) -> None:
        """Gives slots and pages to the waiting, strictly by rank, so that a large one is not passed by for ever."""
        while (first := self._waiting.first()) is not None:
            sequence = self._live[first[1]]
            if not self._may_start() and not self._given_way(sequence):
                return
            found = self._prefixes.find(sequence)
            pages = self._pages_for(len(sequence.token_ids) + self._limits.lookahead_tokens) - len(found)
            if not self._make_room(pages, found):
                return
            self._waiting.discard(*first)
            self._prefixes.begin(sequence, found)
            sequence.pages += self._prefixes.allocate(pages, after=found[-1].number if found else None) or []
            sequence.slot = self._free_slots.pop()
            self._admitted[sequence.slot] = sequence
            insort(self._running, sequence, key=rank)
            self._changes += 1

    def _may_start(self) -> bool:
        """Whether one more sequence would have a slot, if need be a paused one's."""
        most = self._most_running
        return len(self._running) < most or sum(not one.paused for one in self._running) < most

    def _given_way(self, sequence: Sequence) -> bool:
        """For who is watched, one of the background that ranks behind gives up its slot: it might keep it for long."""
        if sequence.request.priority != Priority.INTERACTIVE:
            return False
        ready = [one for one in self._running if not one.paused]
        last = ready[-1]
        if last.request.priority != Priority.BACKGROUND or rank(last) < rank(sequence):
            return False
        self._preempt(last)
        return self._may_start()

    @property
    def _most_running(self) -> int:
        return min(self._width, self._pacing.rows)

    def _awaits_sibling(self, sequence: Sequence, begun: set[bytes]) -> bool:
        """Takes what others have computed of its prompt. Whether a sibling of lower rank is at its next page in this
        very step: one of lower rank that finds no room has taken it from this one before."""
        self._prefixes.catch_up(sequence)
        if sequence.request.siblings == 1:
            return False
        page = self._prefixes.next_page(sequence)
        if page is None or page in begun:
            return page is not None
        begun.add(page)
        return False

    def _make_room(self, pages: int, found: list[PrefixPage]) -> bool:
        """Whether one more sequence may start with so many pages besides those found; takes from the paused what it
        lacks.

        It may if afterwards each that runs could still get another page, lest it be thrown out again at once.
        """
        prefixes = self._prefixes
        paused = [sequence for sequence in self._running if sequence.paused] if self._paused else []
        wanted = pages + len(self._running) - len(paused)
        if wanted > prefixes.room - prefixes.idle(found) + prefixes.reclaimable(paused, found):
            return False
        while len(self._running) >= self._most_running or wanted > prefixes.room - prefixes.idle(found):
            self._preempt(paused.pop())
        return True

    def _grow(self, sequence: Sequence, end: int) -> bool:
        """Gives a running sequence pages for its first `end` tokens; False where it had to yield instead."""
        while True:
            held = sequence.pages
            pages = self._prefixes.allocate(self._pages_for(end) - len(held), after=held[-1])
            if pages is not None:
                held += pages
                return True
            if self._prefixes.let_go(sequence):
                continue
            victim = next((one for one in reversed(self._running) if one.paused), self._running[-1])
            self._preempt(victim)
            if victim is sequence:
                return False

    def _pages_for(self, tokens: int) -> int:
        return -(-min(tokens, self._limits.max_context) // PAGE_SIZE)

    def _enqueue(self, sequence: Sequence) -> None:
        """Lets it wait for a slot, if it has none and nothing else to wait for."""
        if sequence.slot < 0 and not sequence.paused and not sequence.fetching:
            self._waiting.add(*rank(sequence))

    def _preempt(self, sequence: Sequence) -> None:
        """Takes slot and pages away; once it runs again, what of prompt and output was not kept is computed anew."""
        self._tally.preemptions += 1
        self._stop_running(sequence)
        self._enqueue(sequence)

    def _remove(self, sequence: Sequence, sound: bool = True) -> None:
        """Ends a live sequence, wherever it is."""
        del self._live[sequence.key]
        self._watched -= sequence.request.priority == Priority.INTERACTIVE
        if not self._watched:
            self._yielding.away()
        self._turns.ended(sequence)
        when = timer(sequence)
        if when is not None:
            self._timers.discard(when, sequence.key)
        self._paused -= sequence.paused
        if sequence.slot >= 0:
            self._stop_running(sequence, sound)
        elif self._fetching.pop(sequence.key, None) is None:
            self._waiting.discard(*rank(sequence))
        elif self._tier is not None:
            self._tier.leave(sequence.key)

    def _stop_running(self, sequence: Sequence, sound: bool = True) -> None:
        self._running.remove(sequence)
        self._changes += 1
        self._prefixes.release(sequence, sound)
        sequence.computed = sequence.planned_pages = 0
        self._admitted.pop(sequence.slot, None)
        self._released.append(Released(sequence.key, sequence.slot))
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
