"""Gives slots and pages to waiting sequences, strictly by `rank`, and preempts the last where pages lack.

Running sequences have a slot. One that is fetching or parked (its reader is behind) may have none and does not wait for
one.
"""

from __future__ import annotations

from bisect import insort

from engine.api import Priority
from engine.kv.prefix_index import PrefixIndex
from engine.scheduling.limits import Limits
from engine.scheduling.ordered import Ordered
from engine.scheduling.pacing import Pacing
from engine.scheduling.plan import Released, Row, StepPlan
from engine.scheduling.rank import rank
from engine.scheduling.rows import admission_of
from engine.scheduling.sequence import PrefixPage, Sequence
from engine.settings import PAGE_SIZE


class Slots:
    """Also holds the releases and admissions that plans have yet to carry."""

    def __init__(self, limits: Limits, prefixes: PrefixIndex, pacing: Pacing, *, batching: bool) -> None:
        self._limits = limits
        self._prefixes = prefixes
        self._pacing = pacing
        self._width = limits.max_sequences if batching else 1
        self._free = list(range(limits.max_sequences - 1, -1, -1))
        self._line = Ordered()  # ranks of those that wait
        self._waiting: dict[int, Sequence] = {}
        self._admitted: dict[int, Sequence] = {}  # by slot; in no plan yet
        self._released: list[Released] = []  # likewise
        self.running: list[Sequence] = []  # lowest rank first
        self.changes = 0  # of who runs and is not paused
        self.paused = 0  # sequences
        self.preemptions = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def spare(self) -> bool:
        """Whether one more sequence may run beside all that have a slot."""
        return len(self.running) < self.most_running

    @property
    def most_running(self) -> int:
        return min(self._width, self._pacing.rows)

    def enqueue(self, sequence: Sequence) -> None:
        if sequence.slot < 0 and not sequence.paused and not sequence.fetching:
            self._line.add(*rank(sequence))
            self._waiting[sequence.key] = sequence

    def pause(self, sequence: Sequence) -> None:
        """The sequence keeps its slot and pages while no other needs them."""
        self._leave_line(sequence)
        sequence.paused = True
        self.paused += 1
        self.changes += 1

    def resume(self, sequence: Sequence) -> None:
        sequence.paused = False
        self.paused -= 1
        self.changes += 1
        self.enqueue(sequence)

    def set_batching(self, enabled: bool) -> None:
        """Off: one sequence runs at a time. The others give up their pages and wait."""
        self._width = self._limits.max_sequences if enabled else 1
        if len(self.running) > self._width:
            kept = next((one for one in self.running if not one.paused), self.running[0])
            for sequence in [one for one in self.running if one is not kept]:
                self._preempt(sequence)

    def start_waiting(self) -> None:
        """Strictly by rank, so that a large sequence is not overtaken forever."""
        while self.start_first():
            pass

    def start_first(self) -> bool:
        """False where no sequence waits, or the first finds no room."""
        first = self._line.first()
        if first is None:
            return False
        sequence = self._waiting[first[1]]
        if not self._may_start() and not self._given_way(sequence):
            return False
        found = self._prefixes.find(sequence)
        pages = self._pages_for(len(sequence.token_ids) + self._limits.lookahead_tokens) - len(found)
        if not self._make_room(pages, found):
            return False
        self._leave_line(sequence)
        self._prefixes.begin(sequence, found)
        sequence.pages += self._prefixes.allocate(pages, after=found[-1].number if found else None) or []
        sequence.slot = self._free.pop()
        self._admitted[sequence.slot] = sequence
        insort(self.running, sequence, key=rank)
        self.changes += 1
        return True

    def grow(self, sequence: Sequence, end: int) -> bool:
        """Gives pages for the first `end` tokens; False where the sequence had to yield instead."""
        while True:
            held = sequence.pages
            pages = self._prefixes.allocate(self._pages_for(end) - len(held), after=held[-1])
            if pages is not None:
                held += pages
                return True
            if self._prefixes.let_go(sequence):
                continue
            victim = next((one for one in reversed(self.running) if one.paused), self.running[-1])
            self._preempt(victim)
            if victim is sequence:
                return False

    def remove(self, sequence: Sequence, *, sound: bool) -> None:
        """Not `sound`: its computed pages must not be shared."""
        self.paused -= sequence.paused
        if sequence.slot >= 0:
            self._stop(sequence, sound=sound)
        else:
            self._leave_line(sequence)

    # What plans say

    def planned(self, rows: list[Row]) -> StepPlan:
        """Admits those of the rows that got a slot since the last plan, and releases all that gave one up."""
        if not self._admitted and not self._released:
            return StepPlan(tuple(rows))
        # A sequence is admitted by the first step that feeds it, so that an admission that raises fails no other step.
        came = [self._admitted.pop(row.slot) for row in rows if row.slot in self._admitted]
        released = tuple(self._released)
        self._released.clear()
        return StepPlan(tuple(rows), tuple(map(admission_of, came)), released)

    def say_again(self, plan: StepPlan) -> None:
        """Repeats releases and admissions of a failed step, since the runner may not have applied them."""
        self._released = [*plan.released, *self._released]
        still = {sequence.key: sequence for sequence in self.running}
        for admitted in plan.admitted:
            sequence = still.get(admitted.key)
            if sequence is not None and sequence.slot == admitted.slot:
                self._admitted[sequence.slot] = sequence
                sequence.planned_pages = 0

    def begin_anew(self, sequence: Sequence) -> None:
        """Restarts a sequence in its slot, behind its full pages."""
        if sequence.slot not in self._admitted:
            self._released.append(Released(sequence.key, sequence.slot))
            self._admitted[sequence.slot] = sequence
            sequence.planned_pages = 0
            sequence.computed -= sequence.computed % PAGE_SIZE

    # Room

    def _may_start(self) -> bool:
        """Whether one more sequence would have a slot, if need be a paused one's."""
        return self.spare or sum(not one.paused for one in self.running) < self.most_running

    def _given_way(self, sequence: Sequence) -> bool:
        """Preempts the lowest-ranked background sequence for an interactive one."""
        if sequence.request.priority != Priority.INTERACTIVE:
            return False
        ready = [one for one in self.running if not one.paused]
        last = ready[-1]
        if last.request.priority != Priority.BACKGROUND or rank(last) < rank(sequence):
            return False
        self._preempt(last)
        return self._may_start()

    def _make_room(self, pages: int, found: list[PrefixPage]) -> bool:
        """Whether one more sequence may start with `pages` pages besides those found, so that afterwards each running
        one could still get another page, lest it be preempted at once. Takes from paused ones what it lacks."""
        prefixes = self._prefixes
        paused = [sequence for sequence in self.running if sequence.paused] if self.paused else []
        wanted = pages + len(self.running) - len(paused)
        if wanted > prefixes.room - prefixes.idle(found) + prefixes.reclaimable(paused, found):
            return False
        while len(self.running) >= self.most_running or wanted > prefixes.room - prefixes.idle(found):
            self._preempt(paused.pop())
        return True

    def _pages_for(self, tokens: int) -> int:
        return -(-min(tokens, self._limits.max_context) // PAGE_SIZE)

    def _leave_line(self, sequence: Sequence) -> None:
        if self._waiting.pop(sequence.key, None) is not None:
            self._line.discard(*rank(sequence))

    def _preempt(self, sequence: Sequence) -> None:
        """What of prompt and output was not kept is computed anew later."""
        self.preemptions += 1
        self._stop(sequence, sound=True)
        self.enqueue(sequence)

    def _stop(self, sequence: Sequence, *, sound: bool) -> None:
        self.running.remove(sequence)
        self.changes += 1
        self._prefixes.release(sequence, sound)
        sequence.computed = sequence.planned_pages = 0
        self._admitted.pop(sequence.slot, None)
        self._released.append(Released(sequence.key, sequence.slot))
        self._free.append(sequence.slot)
        sequence.slot = -1
