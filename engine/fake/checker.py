"""Checks plans and results without a device: each slot's sequence, its computed tokens, and which sequence wrote which
page.

A plan that reads what was not computed, or was overwritten, is refused. A full page holds a digest of all tokens up to
its end, so that shared pages are checked as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Items

from engine.scheduling.plan import Admitted, Released, Row, RowEnd, RowResult, StepPlan, StepResult
from engine.scheduling.sequence_state import SequenceState, begin
from engine.settings import PAGE_SIZE

PRIME = 2**31 - 1
FACTOR = 48271  # of a well-known generator with this modulus
FOREIGN = -1  # instead of a digest: what is in this page came from elsewhere, and is taken on trust


class BrokenPlan(Exception):
    pass


class Computed:
    __slots__ = ("count", "digest", "digested", "distinct", "overwritten", "stamp", "state", "written")

    def __init__(self, state: SequenceState, stamp: int) -> None:
        self.stamp = stamp  # no two have the same
        self.state = state
        self.count = 0  # tokens whose keys and values are in its pages
        self.distinct: set[int] = set()  # its pages
        self.overwritten = False  # one of them by another sequence
        self.written = 1  # digest of token_ids[:count]
        self.digest = 1  # of token_ids[:digested]
        self.digested = 0


class PlanChecker:
    """Checks a plan row by row, then its results. Everything raises BrokenPlan."""

    def __init__(self, total_pages: int, slots: int) -> None:
        self.full: list[int | None] = [None] * total_pages  # digest of all tokens up to a full page's end
        self._slots = slots
        self._held: dict[int, Computed] = {}  # by slot
        self._stamps = itertools.count(1)
        self._stamped: dict[int, Computed] = {}
        self._writers = [0] * total_pages  # stamps
        self._readers: dict[int, list[Computed]] = {}  # page → who begins with it without having written it

    def begin(self, plan: StepPlan) -> None:
        for released in plan.released:
            self._release(released)
        for admitted in plan.admitted:
            self._admit(admitted)
        if len(plan.rows) > 1 and len({row.slot for row in plan.rows}) < len(plan.rows):
            raise BrokenPlan("two rows share a slot")

    def feed(self, row: Row) -> Computed:
        held = self._held.get(row.slot)
        if held is None:
            raise BrokenPlan(f"no sequence was admitted to slot {row.slot}")
        if held.state.key != row.key:
            raise BrokenPlan(f"slot {row.slot} is held by sequence {held.state.key}, not by {row.key}")
        if row.pages:
            self._set_pages(row, held)
        end = row.start + row.count
        self._check(row, held, end)
        ids, digest = held.state.token_ids, held.digest
        for token_id in ids[held.digested : end]:
            digest = (digest * FACTOR + token_id) % PRIME
        held.digest, held.digested = digest, end
        self.write(held, ids[held.count : end])
        return held

    def brought(self, row: Row, held: Computed, result: RowResult) -> None:
        if result.end is RowEnd.LATE:
            self._take_back_one(held)
            return
        ids = result.token_ids
        held.state.token_ids += ids
        fed = len(ids) - result.forced - 1  # of the new ones
        if fed > 0:
            if row.start + row.count + fed > len(held.state.pages) * PAGE_SIZE:
                raise BrokenPlan(f"{fed + 1} ids do not fit into the pages of sequence {row.key}")
            self.write(held, ids[:fed])

    def _take_back_one(self, held: Computed) -> None:
        held.count -= 1
        self.full[held.state.pages[held.count // PAGE_SIZE]] = None
        held.written = held.digest = _digest(1, held.state.token_ids[: held.count])
        held.digested = held.count

    def result(self, plan: StepPlan, result: StepResult) -> None:
        """Calls `brought` for all rows, for runners other than the fake one."""
        if result.rows.keys() != {row.key for row in plan.rows if row.sample or row.score}:
            raise BrokenPlan("results came for other rows than those that sample or score")
        for row in plan.rows:
            if row.score and len(result.rows[row.key].prompt_logprobs) != self._scores(row):
                raise BrokenPlan(f"sequence {row.key} did not get one log-probability for each token of its prompt")
            if row.sample:
                self.brought(row, self._held[row.slot], result.rows[row.key])

    def _scores(self, row: Row) -> int:
        return min(row.start + row.count, self._held[row.slot].state.prompt_length - 1) - row.start

    def write(self, held: Computed, token_ids: Items[int]) -> None:
        pages, writers, full = held.state.pages, self._writers, self.full
        position, digest = held.count, held.written
        for token_id in token_ids:
            digest = (digest * FACTOR + token_id) % PRIME
            page = pages[position // PAGE_SIZE]
            stamp = writers[page]
            if stamp != held.stamp:
                if stamp in self._stamped:
                    self._stamped[stamp].overwritten = True
                writers[page] = held.stamp
            for reader in self._readers.pop(page, ()):
                reader.overwritten = True
            position += 1
            full[page] = None if position % PAGE_SIZE else digest
        held.count, held.written = position, digest

    def filled(self, page: int, digest: int | None) -> None:
        if self._writers[page] in self._stamped:
            self._stamped[self._writers[page]].overwritten = True
        for reader in self._readers.pop(page, ()):
            reader.overwritten = True
        self._writers[page] = 0
        self.full[page] = digest

    def in_place(self, row: Row) -> int:
        """How many tokens before the row's first its pages hold. Changes nothing."""
        held = self._held[row.slot]
        pages = [*held.state.pages[: row.first_page], *row.pages] if row.pages else held.state.pages
        count, digest = held.count, held.written
        while not count % PAGE_SIZE and count + PAGE_SIZE <= row.start and count // PAGE_SIZE < len(pages):
            digest = _digest(digest, held.state.token_ids[count : count + PAGE_SIZE])
            if self.full[pages[count // PAGE_SIZE]] not in (digest, FOREIGN):
                break
            count += PAGE_SIZE
        return min(count, row.start)

    def _release(self, released: Released) -> None:
        held = self._held.get(released.slot)
        if held is not None and held.state.key == released.key:
            self._drop(held)

    def _admit(self, admitted: Admitted) -> None:
        slot, held = admitted.slot, self._held.get(admitted.slot)
        if not 0 <= slot < self._slots:
            raise BrokenPlan(f"there is no slot {slot}")
        if held is not None and held.state.key != admitted.key:
            raise BrokenPlan(f"slot {slot} changed hands before sequence {held.state.key} was released")
        if any(other.state.key == admitted.key for at, other in self._held.items() if at != slot):
            raise BrokenPlan(f"sequence {admitted.key} has a slot already")
        if not 0 < admitted.prompt_length <= len(admitted.token_ids):
            raise BrokenPlan(f"{admitted.prompt_length} of {len(admitted.token_ids)} tokens cannot be the prompt")
        if held is not None:
            self._drop(held)
        fresh = Computed(begin(admitted), next(self._stamps))
        self._held[slot] = self._stamped[fresh.stamp] = fresh

    def _drop(self, held: Computed) -> None:
        del self._held[held.state.slot], self._stamped[held.stamp]
        for page in held.state.pages:
            readers = self._readers.get(page, [])
            if held in readers:
                readers.remove(held)

    def _set_pages(self, row: Row, held: Computed) -> None:
        old, written = held.state.pages, -(-held.count // PAGE_SIZE)
        first, pages = row.first_page, row.pages
        if first > len(old):
            raise BrokenPlan(f"page {first} is said before page {len(old)}")
        if not 0 <= min(pages) <= max(pages) < len(self.full):
            raise BrokenPlan("there is no such page")
        if first < written and (*pages[: written - first],) != (*old[first:written],):
            raise BrokenPlan("computed pages were exchanged")
        held.distinct.difference_update(old[first:])
        if len(set(pages)) < len(pages) or not held.distinct.isdisjoint(pages):
            raise BrokenPlan("a sequence has a page twice")
        held.distinct.update(pages)
        held.state.set_pages(first, pages)

    def _check(self, row: Row, held: Computed, end: int) -> None:
        if row.start > held.count:
            self._adopt(row, held)
        if row.start != held.count:
            raise BrokenPlan(f"{held.count} tokens were computed, the row begins at {row.start}")
        if held.overwritten:
            raise BrokenPlan("another sequence wrote into computed pages")
        if end == row.start or end > len(held.state.pages) * PAGE_SIZE:
            raise BrokenPlan(f"no pages or no tokens for {row.start}…{end}")
        if row.sample != (end == len(held.state.token_ids)):
            raise BrokenPlan("a row samples behind the last token, and only there")

    def _adopt(self, row: Row, held: Computed) -> None:
        """Uses full pages that others computed, as far as they are right."""
        if held.count % PAGE_SIZE or row.start % PAGE_SIZE:
            return
        state = held.state
        for index in range(held.count // PAGE_SIZE, min(row.start // PAGE_SIZE, len(state.pages))):
            page = state.pages[index]
            digest = _digest(held.written, state.token_ids[index * PAGE_SIZE : (index + 1) * PAGE_SIZE])
            if self.full[page] == FOREIGN:
                self.full[page] = digest
            if self.full[page] != digest:
                raise BrokenPlan(f"page {page} does not hold what the sequence begins with")
            held.written = digest
            held.count += PAGE_SIZE
            self._readers.setdefault(page, []).append(held)


def _digest(digest: int, token_ids: Items[int]) -> int:
    for token_id in token_ids:
        digest = (digest * FACTOR + token_id) % PRIME
    return digest
