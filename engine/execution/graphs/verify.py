"""Verifies drafts by captured graphs: decode kernels over newest tokens and drafts, acceptance and the next drafts, all
on the device. Prompt lookup drafts at the end of a launch for the next, a draft model at the beginning for this one."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from engine.errors import EngineFailed
from engine.execution import device_sampling as sampled
from engine.execution.graphs.chains import Chain, Chains, distinct, fitting, reaches
from engine.execution.graphs.decode import Choice
from engine.execution.graphs.prefill import DeviceDraft
from engine.execution.graphs.row_state import RowLayout, write_pages
from engine.execution.needs import require_known
from engine.execution.pipeline import GROUPS, MOST_VERIFY_AHEAD, MorePages, Rewrite, StepLaunch
from engine.execution.poller import RingPoller
from engine.execution.speculation.verifying import prefix_length
from engine.kernels import sampling, speculation
from engine.kernels.attention import RowPages
from engine.kernels.build import Kernels
from engine.kernels.capture import Mailbox
from engine.kernels.launch import Launch
from engine.kernels.ring import entry_of, words
from engine.kernels.sampling import Sampling
from engine.kernels.speculation import Future, Verified
from engine.loading.progress import Progress
from engine.model.layers import few_rows
from engine.model.layers.draft_steps import DraftSteps
from engine.scheduling.sequence_state import SequenceState
from engine.settings import PAGE_SIZE

_TIMINGS, _BEFORE = 16, 8  # launches of a kind at warm-up, of which the median counts; and before them
_GUESSES = 8  # in a row: a launch of its own takes longer than a short one
_RESIDENT = 2  # blocks of attention on a multiprocessor: launches of four and more rows have too many for one each
_TYPICAL = 256, 768  # tokens of sequences whose launches are timed: of two reaches of attention
_RING = 2 * MOST_VERIFY_AHEAD * GROUPS[-1]  # entries of a row: half of them under way, half of a row that has left


class VerifyGraphs:
    """Makes launches for a fixed number of sequences, on torch's current stream."""

    def __init__(
        self,
        library: Kernels,
        weights: few_rows.StepWeights,
        max_context: int,
        future: Future | None = None,
        draft: DeviceDraft | None = None,
        *,
        sequences: int = 1,
        groups: Sequence[int] = GROUPS,
        beside: VerifyGraphs | None = None,
    ) -> None:
        """Several sequences have one group: their rows are laid out side by side. `beside` takes turns with these
        graphs, on one sampling state."""
        self._library, self._weights = library, weights
        self._max_context = max_context
        self._groups = groups
        self._layout = layout = RowLayout(sequences, groups[-1], max_context)
        # `future`: what a draft for measurements knows instead of what was guessed. `draft` None: prompt lookup.
        self._future, self._draft = future, draft
        device = weights.table.device
        self._chains = Chains(device)
        self._mailbox = Mailbox(layout.size, device)
        self._state = layout.state(self._mailbox.arrived)
        self._state.newest.fill_(-1)
        self._room = self._row_memory()
        self._verified = self._sequence_memory()
        self._guessing: DraftSteps | None = None
        if draft is not None:
            pages, guessing = self._room.places.pages, self._state.draws[1:]
            self._guessing = DraftSteps(draft.weights, self._verified, guessing, pages)
        self._ring = words(self._verified.ring)
        self._start: Launch | None = None
        self._sampling: Sampling = (
            beside._sampling if beside else sampling.allocate(layout.rows, weights.head.rows, device)
        )
        self._draws = False  # whether the sampling stages are needed
        self._two_pass = weights.coarse is not None
        self._groups_made: dict[int, dict[Choice, tuple[Chain, ...]]] = {}  # by group; shortest chains first
        self._poller = RingPoller()

    def _row_memory(self) -> few_rows.StepBuffers:
        room, verifying = few_rows.allocate(self._weights, self._layout.rows, 1, 1), self._state.draws[0]
        choice = replace(room.choice, temperature=verifying.temperature, noise_key=verifying.noise_key)
        places = RowPages(room.places.position, self._layout.pages(self._mailbox.arrived))
        return replace(room, choice=choice, places=places)

    def _sequence_memory(self) -> Verified:
        layout, state = self._layout, self._state
        return replace(
            speculation.allocate(layout.sequences, layout.laid, 1, _RING, self._weights.table.device),
            history=layout.history(self._mailbox.arrived),
            newest=state.newest,
            held=state.held,
            last_position=state.last_position,
            most_drafts=state.most_drafts,
            stops=state.stops,
            count=state.count,
        )

    def build(self, groups: Sequence[int] | None = None) -> None:
        """Builds these groups, or all. Raises BuildError."""
        for group in groups or self._groups:
            self._groups_made[group] = self._made(group)
        self._start = self._propose().alone()

    def _propose(self) -> Launch:
        library = self._library
        first = few_rows.first_norm(self._weights, self._room)
        if self._future is None:
            return speculation.lookup(library, self._verified, self._room.places, first)
        return speculation.replay(library, self._verified, self._room.places, first, self._future)

    def _guess(self, plan: few_rows.ChainPlan, count: int) -> list[Launch]:
        if self._guessing is None:
            return []
        laid = self._propose()
        if self._future is None:
            first = few_rows.first_norm(self._weights, self._room)
            laid = self._guessing.drafted(self._library, self._room.places, first, count)
        return self._guessing.launches(self._library, plan, count, laid)

    def _plan(self, group: int, longest: int) -> few_rows.ChainPlan:
        return replace(few_rows.ChainPlan.of(self._library.gpu), group=group, resident=_RESIDENT, longest=longest)

    def _made(self, group: int) -> dict[Choice, tuple[Chain, ...]]:
        library, weights = self._library, self._weights
        rows = self._layout.sequences * group
        buffers = self._room.first(rows)
        lengths = reaches(self._max_context)
        plans = [self._plan(group, longest) for longest in lengths]
        layers = [few_rows.prepare_layers(library, weights, buffers, plan) for plan in plans]
        choices: list[tuple[Sampling | None, bool]] = [(None, False), (self._sampling.first(rows), False)]
        choices += [(None, True)] if self._two_pass else []
        made = {}
        for draws, two_pass in choices:
            ways = [replace(plan, two_pass=two_pass) for plan in plans]
            channels = few_rows.channels_of_choice(weights, ways[0], draws)
            accept = speculation.accept(library, buffers.choice, self._verified, self._room.places, group, channels)
            ending = (accept,) if self._guessing else (accept, self._propose())
            chains = []
            for longest, plan, common in zip(lengths, ways, layers, strict=True):
                chain = few_rows.prepare_step(library, weights, buffers, plan, draws, ending, common)
                chains.append(Chain(longest, (*self._guess(plan, group - 1), *chain)))
            made[draws is not None, two_pass] = distinct(chains)
        return made

    def warmup(self, progress: Progress) -> None:
        """Leaves sampling stages of several sequences to first use: a start does not wait for them."""
        gc.collect()  # a graph that is dropped during a capture would spoil it
        progress("kernels", 0, 1)
        self.build()
        progress("kernels", 1, 1)
        alone = self._layout.sequences == 1
        wanted = [
            chain
            for made in self._groups_made.values()
            for (draws, two_pass), chains in made.items()
            if (alone if draws else two_pass == self._two_pass)
            for chain in chains
        ]
        for done, chain in enumerate(wanted):
            progress("graphs", done, len(wanted))
            self._chains.capture(chain).replay()
        idle = self._mailbox.arrived[: self._layout.block].cpu().numpy()
        for _ in range(2):  # both of its slots
            self._mailbox.send(idle)
        for pages in ([0], [0, 0]):
            self._add_pages(MorePages(0, 0, tuple(pages), cut=True))
        self._enqueue_start()
        self._sampling.rehearse()
        torch.cuda.synchronize()
        progress("graphs", len(wanted), len(wanted))

    def seconds(self, group: int, drafts: int) -> float:
        """Returns the mean seconds of a launch of sequences of typical lengths. Overwrites the first page."""
        return self._timed(lambda longest: self.launch(StepLaunch(longest, group=group)), drafts)

    def guessing_seconds(self, group: int) -> float:
        """Returns what a draft model takes of `seconds` for the group's longest drafts."""
        graphs: dict[int, torch.cuda.CUDAGraph] = {}

        def guess(longest: int) -> None:
            if longest not in graphs:
                plan = self._plan(group, fitting(self._groups_made[group][False, False], longest).longest)
                launches = self._guess(plan, group - 1) * _GUESSES
                graphs[longest] = self._chains.graphs.record(partial(self._chains.launcher.enqueue, launches))
            graphs[longest].replay()

        return self._timed(guess, group - 1) / _GUESSES if self._guessing else 0.0

    def _timed(self, launch: Callable[[int], None], drafts: int) -> float:
        places = [min(at, self._max_context // 2) for at in _TYPICAL]
        return statistics.fmean(self._timed_at(launch, at, drafts) for at in places)

    def _timed_at(self, launch: Callable[[int], None], at: int, drafts: int) -> float:
        """Returns the seconds of a launch with newest tokens at `at`. `launch` gets the most tokens of a sequence."""
        event: type[torch.cuda.Event] = torch.cuda.Event
        longest = self._pretend(at, drafts)
        stand = self._chains.graphs.record(lambda: self._stand(at))  # a graph behind other launches begins later
        for _ in range(_BEFORE):  # idle rows: while they run, the host gets ahead
            launch(longest)
        found = []
        for _ in range(_TIMINGS):
            stand.replay()
            begin, end = event(enable_timing=True), event(enable_timing=True)
            begin.record()
            launch(longest)
            end.record()
            found.append((begin, end))
        torch.cuda.synchronize()
        self._state.newest.fill_(-1)
        return statistics.median(float(begin.elapsed_time(end)) / 1e3 for begin, end in found)

    def _pretend(self, at: int, most_drafts: int) -> int:
        """Writes stand-in sequences. Returns the most tokens of each."""
        state = self._state
        self._mailbox.arrived.zero_()
        for part in (state.newest, state.stops):
            part.fill_(-1)
        for part, value in ((state.held, self._max_context), (state.most_drafts, most_drafts)):
            part.fill_(value)
        state.last_position.fill_(self._max_context)
        self._enqueue_start()
        return self._reach(at)

    def _stand(self, at: int) -> None:
        """Makes all tokens alike, so that lookup finds a draft and every row is fed."""
        self._state.newest.fill_(at)
        self._verified.history[:, at : self._reach(at)].zero_()
        self._enqueue_start()

    def _reach(self, at: int) -> int:
        return min(at + 1 + self._layout.laid, self._max_context)

    def _enqueue_start(self) -> None:
        if self._start is None:
            raise EngineFailed("no step was built")
        self._chains.launcher.enqueue([self._start])

    def update(self, update: Rewrite | MorePages) -> None:
        if isinstance(update, MorePages):
            self._add_pages(update)
            return
        rows = update.rows
        known = [np.array(row.sequence.token_ids, dtype=np.int32) for row in rows]
        require_known((int(end) for ids in known for end in (ids.min(), ids.max())), self._weights.table.shape[0])
        if update.number == 0:
            torch.cuda.synchronize()
            self._verified.ring.zero_()
        if self._draft is not None:
            for row in rows:
                self._draft.compute(row.sequence, prefix_length(row.position))
        self._mailbox.send(self._layout.of(rows, update.number, known), self._layout.others(known))
        self._draws = any(sampled.needed(row.sequence) for row in rows)
        if self._draws:
            for at in range(len(rows) * self._layout.laid):
                sampled.place(self._sampling, at, rows[at // self._layout.laid].sequence)
        self._enqueue_start()

    def computed(self, sequence: SequenceState, stands: int) -> None:
        """Notes how far the draft model has come with a sequence that leaves with its newest token at `stands`."""
        if self._draft is not None:
            self._draft.computed(sequence, prefix_length(stands))

    def _add_pages(self, more: MorePages) -> None:
        write_pages(self._room.places.pages[more.index], more.first, more.pages)
        self._state.held[more.index].fill_((more.first + len(more.pages)) * PAGE_SIZE)
        if more.cut:
            self._enqueue_start()

    def launch(self, launch: StepLaunch) -> None:
        self._poller.launched()
        options = launch.options
        two_pass = options.two_pass_head and self._two_pass and not self._draws
        chain = fitting(self._groups_made[launch.group][self._draws, two_pass], launch.longest)
        self._chains.run(chain, captured=options.graphs)

    def poll(self, index: int, number: int) -> int | None:
        return entry_of(self._ring, index, number, _RING)

    def wait(self) -> None:
        self._poller.wait()

    def close(self) -> None:
        torch.cuda.synchronize()
        self._chains.graphs.clear()
