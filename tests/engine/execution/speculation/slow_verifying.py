"""A slow make-believe device of rounds that proposes by itself, and sequences that live on it, beside the plain steps
that rows come from and go back to."""

from __future__ import annotations

import random
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from engine.execution.pipeline import (
    GROUPS,
    MORE,
    MOST_VERIFY_AHEAD,
    PARKED,
    MorePages,
    Pipeline,
    Rewrite,
    StepLaunch,
    VerifiedDraft,
    in_flight,
    run_share,
    verify_lookahead,
)
from engine.execution.router import AHEAD as STEPS_AHEAD
from engine.execution.router import ALL_OPTIONS, Capacity, Executors, Role, StepOptions
from engine.execution.speculation.estimates import PaidDepths
from engine.execution.speculation.verifying import (
    BEGINNING,
    STAYS,
    DraftProgress,
    SinglePolicy,
    VerifyingRows,
    Way,
    prefix_length,
)
from engine.kernels.reference import verified
from engine.scheduling.limits import Limits
from engine.scheduling.plan import Row, RowResult, Share
from engine.scheduling.sequence_state import SequenceState, SequenceTable
from engine.settings import PAGE_SIZE
from tests.engine.execution.slow_device import Life, SlowDevice, SlowMemory, SlowRunner, after

LAID, RING = GROUPS[-1], 128
MOST_CONTEXT = 150


@dataclass
class DeviceSequence:
    """A sequence in the device's own memory."""

    newest: int = -1
    held: int = 0
    last: int = 0
    most_drafts: int = 0
    stops: tuple[int, ...] = ()
    count: int = 0
    history: list[int] = field(default_factory=list)
    pages: dict[int, int] = field(default_factory=dict)
    laid: list[int] = field(default_factory=list)  # the newest token and its draft


class SlowDraft:
    """A draft model's own memory, under the target's pages by number."""

    def __init__(self, pages: int) -> None:
        self.slots = [[-1] * PAGE_SIZE for _ in range(pages)]
        self.followed = DraftProgress()
        self.fed = 0  # tokens, to catch up

    def compute(self, ids: list[int], pages: dict[int, int], places: range) -> None:
        for at in places:
            self.slots[pages[at // PAGE_SIZE]][at % PAGE_SIZE] = ids[at]

    def check(self, own: DeviceSequence) -> None:
        """It reads all of the sequence."""
        there = [self.slots[own.pages[at // PAGE_SIZE]][at % PAGE_SIZE] for at in range(own.newest + 1)]
        assert there == own.history[: own.newest + 1], "it lacks tokens"


class SlowRounds(SlowMemory):
    """A `RoundDevice` that does what it was told when it feels like it. Its drafts are right as often as `chance`; of
    a `draft` model, they are fed to it."""

    def __init__(
        self,
        seed: int,
        beside: SlowMemory,
        sick: int,
        chance: float,
        sequences: int = 1,
        draft: SlowDraft | None = None,
    ) -> None:
        super().__init__(seed, len(beside.slots), sick, beside)
        self.drafting = draft
        self.own = [DeviceSequence() for _ in range(sequences)]
        self.laid, self.chance, self.silence = LAID // sequences, chance, 0.1
        self.ring: dict[tuple[int, int], tuple[int, int]] = {}
        self.written = self.launched = self.parked = self.cut = 0

    def update(self, update: Rewrite | MorePages) -> None:
        if isinstance(update, Rewrite):
            self.write(update)
        else:
            self.add_pages(update)

    def write(self, update: Rewrite) -> None:
        rows, number = update.rows, update.number
        self.written += 1
        fresh = [DeviceSequence(count=number) for _ in self.own]
        for at, row in enumerate(rows):
            most = row.most_drafts
            ids = [*row.sequence.token_ids]
            assert (row.position, row.token) == (len(ids) - 1, ids[-1])
            pages = dict(enumerate(row.pages))
            held = PAGE_SIZE * len(pages)
            fresh[at] = DeviceSequence(row.position, held, row.last_position, most, row.stops, number, ids, pages)
        if number == 0:
            self.flush()
            self.ring.clear()
        for own, row in zip(fresh, rows, strict=False):
            self.catch_up(own, row.sequence)

        def write() -> None:
            self.own = fresh
            self.lay()

        self.queue.append(write)

    def catch_up(self, own: DeviceSequence, sequence: SequenceState) -> None:
        if self.drafting is not None:
            draft, ids, pages = self.drafting, [*own.history], {**own.pages}
            places = range(draft.followed.tokens(sequence), prefix_length(own.newest))
            draft.followed.computed(sequence, prefix_length(own.newest))
            draft.fed += len(places)
            self.queue.append(lambda: draft.compute(ids, pages, places))

    def computed(self, sequence: SequenceState, stands: int) -> None:
        self.flush()
        known = [*sequence.token_ids]
        ended = [own for own in self.own if own.newest < 0]
        assert ended or any(own.newest == stands and own.history[: len(known)] == known for own in self.own)
        if self.drafting is not None:
            self.drafting.followed.computed(sequence, prefix_length(stands))

    def add_pages(self, more: MorePages) -> None:
        index, cut, added = more.index, more.cut, dict(enumerate(more.pages, more.first))

        def add() -> None:
            own = self.own[index]
            whole = min(own.held, own.last) == own.last or own.newest + own.most_drafts < own.held
            assert cut or own.newest < 0 or whole, "a draft that pages had cut stays short"
            own.pages.update(added)
            own.held = PAGE_SIZE * len(own.pages)
            if cut:
                self.cut += 1
                self.lay()

        self.queue.append(add)

    def launch(self, launch: StepLaunch) -> None:
        group, longest = launch.group, launch.longest
        assert len(self.own) == 1 or group == self.laid, "rows stand as they are laid out"
        self.launched += 1
        self.queue.append(lambda: self.round(group, longest))

    def poll(self, index: int, number: int) -> int | None:
        self.work()
        found, entry = self.ring.get((index, (number - 1) % RING), (0, 0))
        return entry if found == number else None

    def lay(self) -> None:
        for own in self.own:
            own.laid = self.draft(own) if own.newest >= 0 else []

    def draft(self, own: DeviceSequence) -> list[int]:
        rows = max(min(own.held, own.last) - own.newest, 0)
        known = [*own.history]
        fed = self.drafting is None or own.newest > 0  # its first step feeds two tokens
        if not fed or self.random.random() < self.silence:  # nothing comes to mind
            rows = min(rows, 1)
        for _ in range(self.laid - 1):
            right = self.random.random() < self.chance
            known.append(after(known) if right else self.random.randrange(5000))
        return known[own.newest : own.newest + min(rows, 1 + own.most_drafts)]

    def slot(self, own: DeviceSequence, at: int) -> tuple[list[int], int]:
        return self.slots[own.pages[at // PAGE_SIZE]], at % PAGE_SIZE

    def read(self, own: DeviceSequence, tokens: int) -> list[int]:
        return [page[at] for page, at in (self.slot(own, place) for place in range(tokens))]

    def round(self, group: int, longest: int) -> None:
        for index, own in enumerate(self.own):
            if own.newest >= 0:
                self.verify(index, own, group, longest)
        self.lay()

    def verify(self, index: int, own: DeviceSequence, group: int, longest: int) -> None:
        fed = own.laid[:group]
        if not fed:
            self.parked += 1
            return self.tell(index, PARKED << 24)
        assert own.newest + len(fed) <= longest, "a row outgrew its launch"
        if self.drafting is not None and own.newest > 0:
            self.drafting.compute(own.history, own.pages, range(own.newest - 1, own.newest + 1))
            self.drafting.check(own)
            guesses = [*own.history[: own.newest + 1], *fed[1:]]
            self.drafting.compute(guesses, own.pages, range(own.newest + 1, own.newest + len(fed) - 1))
        for at, token in enumerate(fed, own.newest):
            page, place = self.slot(own, at)
            page[place] = token
        chosen: list[int | None] = [after(self.read(own, own.newest + at + 1)) for at in range(len(fed))]
        chosen = [None if token is not None and token % 100 == self.sick else token for token in chosen]
        told = verified(fed, chosen, own.newest, own.last, own.stops)
        for at, (token, flags) in enumerate(told):
            closing = at + 1 == len(told)
            proposed, seen = (len(fed) - 1, flags) if closing else (0, MORE)
            self.tell(index, proposed << 28 | seen << 24 | (token or 0))
            own.history += [] if token is None else [token]
        own.newest = -1 if told[-1][1] else own.newest + len(told)
        return None

    def tell(self, index: int, entry: int) -> None:
        own = self.own[index]
        own.count += 1
        self.ring[index, (own.count - 1) % RING] = own.count, entry


class Whims(PaidDepths):
    """Depths that change at any time."""

    def __init__(self, seed: int, depths: Rows[int]) -> None:
        self.random, self.depths = random.Random(seed), depths
        self.told_of: list[VerifiedDraft] = []

    def most(self, sequence: SequenceState) -> int:
        return 0 if sequence.stopping.min_tokens > sequence.output_length else LAID - 1

    def depth(self, sequence: SequenceState) -> int:
        return self.random.choice(self.depths)

    def observe(self, sequence: SequenceState, one: VerifiedDraft) -> None:
        self.told_of.append(one)

    def worth(self, sequence: SequenceState, depth: int) -> bool:
        return True

    def holds(self, sequence: SequenceState) -> bool:
        return self.random.random() < 0.2

    def left(self, sequence: SequenceState) -> None:
        """It comes back when it likes."""


class WhimsTogether:
    """A chooser for several sequences that changes its mind at any time."""

    def __init__(self, seed: int, group: int) -> None:
        self.random, self.size = random.Random(seed), group
        self.told_of: list[tuple[int, VerifiedDraft]] = []
        self.stays = 0.9

    def group(self, sequences: Rows[SequenceState], *, continues: bool) -> int:
        if any(one.stopping.min_tokens > one.output_length for one in sequences):
            return 0
        return self.size if self.random.random() < (self.stays if continues else 0.7) else 0

    def most(self, sequence: SequenceState) -> int:
        """One of three rides without a draft."""
        return (self.size - 1) * (sequence.key % 3 != 2)

    def observe(self, sequence: SequenceState, one: VerifiedDraft) -> None:
        self.told_of.append((sequence.key, one))


class Steps:
    """Decodes in plain steps."""

    def __init__(self, device: SlowDevice, sequences: SequenceTable) -> None:
        self.pipeline = Pipeline(device, sequences, MOST_CONTEXT)

    def in_flight(self, rows: tuple[Row, ...]) -> dict[int, int]:
        return in_flight([self.pipeline], rows)

    def run(self, share: Share) -> dict[int, RowResult]:
        return run_share(self.pipeline, share, ALL_OPTIONS)


class Verifying(VerifyingRows):
    """As the executor does, tells the device what a draft model has computed of rows that drain."""

    def __init__(self, ways: dict[int, Way], devices: dict[int, SlowRounds], sequences: SequenceTable) -> None:
        super().__init__(ways, sequences)
        self.devices = devices

    def run(self, share: Share, options: StepOptions = ALL_OPTIONS) -> dict[int, RowResult]:
        found = super().run(share, options)
        if share.drain:
            for row in share.rows:
                stands = row.start + len(found[row.key].token_ids)
                self.devices[share.pipeline].computed(self._sequences.of(row), stands)
        return found


class RoundsLife(Life):
    """Sequences that are fed in rounds while one decodes alone, and where there are rounds for several, together."""

    def __init__(
        self,
        seed: int,
        pages: int,
        lookahead: int,
        sick: int,
        chance: float,
        depths: Rows[int],
        most: int = 3,
        *,
        shared: bool = False,
        together: Rows[int] = (),
        sequences: int | None = None,
        drafted: bool = False,
        waits: bool = True,
    ) -> None:
        """`together`: the most sequences that rounds for several take. `sequences`: at once, not one or `most`.
        `drafted`: by a model. `waits`: for plain steps under way."""
        steps, table = SlowDevice(seed, pages, sick), SequenceTable()
        self.steps = steps
        self.draft = SlowDraft(pages) if drafted else None
        self.device = SlowRounds(seed, steps, sick, chance, draft=self.draft)
        self.whims = Whims(seed, depths)
        limits = Limits(
            max_sequences=sequences or random.Random(seed).choice((1, most)),
            max_batch_tokens=random.Random(seed).choice((5, 64)),
            max_context=min(MOST_CONTEXT, pages * PAGE_SIZE),
            lookahead_tokens=lookahead,
            max_tokens_per_row=max(MOST_VERIFY_AHEAD * LAID, 2 * STEPS_AHEAD),
        )
        ahead = verify_lookahead(random.Random(seed).choice((1e-6, 1e-4, 1.0)))

        def pipeline(device: SlowRounds, most: int) -> Pipeline:
            made = Pipeline(device, table, limits.max_context, buckets=(most,), sizes=(1,), settles=False)
            made.lookahead = {most: ahead}
            return made

        self.pipeline = pipeline(self.device, 1)
        patience, beginning = random.Random(seed).choice(((0, 0), (STAYS, 0), (STAYS, BEGINNING)))
        alone = SinglePolicy(self.whims, 0) if drafted else SinglePolicy(self.whims, patience, beginning)
        self.devices = {most: SlowRounds(seed, steps, sick, chance, most, self.draft) for most in together}
        self.choosers = {most: WhimsTogether(seed, LAID // most) for most in together}
        ways = {1: Way(self.pipeline, alone)}
        for most in together:
            ways[most] = Way(pipeline(self.devices[most], most), self.choosers[most])
        self.rounds = Verifying(ways, {1: self.device, **self.devices}, table)
        plain = Steps(steps, table)
        capacity = Capacity(verify=tuple(ways), few=1, drains_few=waits)
        executors = Executors({Role.VERIFY: self.rounds, Role.FEW: plain}, self.rounds)
        runner = SlowRunner(steps, capacity, {Role.VERIFY: self.rounds, Role.FEW: plain}, table, executors)
        super().__init__(seed, runner, limits, shared=shared)

    def speculate(self, enabled: bool) -> None:
        self.runner.options = StepOptions(speculation=enabled)
