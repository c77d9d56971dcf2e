"""Rounds as captured graphs: the decode step's kernels over the newest token and a draft, the acceptance, and the next
draft, all on the device. A `rounds.RoundDevice`.

A draft that is looked up is laid out at the end of a round, for whichever comes next. A draft model guesses at the
beginning, as many tokens as the round verifies.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import EngineFailed
from engine.execution import device_sampling as sampled
from engine.execution.capture import Recorder
from engine.execution.graph_decode.captured_steps import REACHES, Steps, distinct, told, words
from engine.execution.graph_decode.pipeline import MOST_STOPS, RowState
from engine.execution.mailbox import Mailbox
from engine.execution.speculation.captured.draft_steps import DeviceDraft, DraftSteps
from engine.execution.speculation.captured.rounds import GROUPS, MOST_AHEAD
from engine.kernels import sampling, speculation
from engine.kernels.attention import RowPages
from engine.kernels.build import Kernels
from engine.kernels.launch import Launch, launcher_of
from engine.kernels.sampling import Sampling
from engine.kernels.speculation import Future, Verified
from engine.kernels.step import ChainPlan, StepBuffers, StepWeights, allocate, first_norm, prepare_layers, prepare_step
from engine.loading.progress import Progress
from engine.settings import PAGE_SIZE

LAID = GROUPS[-1]  # rows that every round lays out for the next one, of whatever group that is
RING = 64  # entries
_NAP = 20e-6  # seconds between two looks at the ring
_LOOKS = 64  # after so many the stream is asked
_TIMINGS, _TOGETHER = 3, 8  # rounds timed at warm-up: so often so many
_RESIDENT = 2  # blocks of attention on a multiprocessor: rounds of four and more have too many for one each
_TYPICAL = 256, 768  # tokens of sequences whose rounds are timed: of two reaches of attention
_BLOCK = 64  # words; what lies behind it begins at a multiple of 256 bytes, as memory of its own would
assert 3 * LAID + 5 + MOST_STOPS <= _BLOCK
assert MOST_AHEAD * LAID <= RING  # half of it under way, half of a row that has left


@dataclass(frozen=True, slots=True)
class State:
    """What the host writes of a row, beside its pages and tokens."""

    noise_key: torch.Tensor  # int64 [laid], all alike
    temperature: torch.Tensor  # float32 [laid], all alike
    newest: torch.Tensor
    held: torch.Tensor
    last_position: torch.Tensor
    most_drafts: torch.Tensor
    count: torch.Tensor
    stops: torch.Tensor  # [1, 8]


def state_of(block: torch.Tensor) -> State:
    """The parts of int32 [64]; views."""
    newest, held, last_position, most_drafts, count = (block[3 * LAID + at : 3 * LAID + at + 1] for at in range(5))
    return State(
        noise_key=block[: 2 * LAID].view(torch.int64),
        temperature=block[2 * LAID : 3 * LAID].view(torch.float32),
        newest=newest,
        held=held,
        last_position=last_position,
        most_drafts=most_drafts,
        count=count,
        stops=block[3 * LAID + 5 :][:MOST_STOPS].view(1, MOST_STOPS),
    )


def laid_out(row: RowState, most_drafts: int, number: int, room: int, known: NDArray[np.int32]) -> NDArray[np.int32]:
    """What the device is sent of a row: the parts of `State`, its pages in a room of so many words, its tokens."""
    words = np.zeros(_BLOCK + room + len(known), dtype=np.int32)
    words[: 2 * LAID].view(np.int64)[:] = row.noise_key
    words[2 * LAID : 3 * LAID].view(np.float32)[:] = row.temperature
    stand = row.position, len(row.pages) * PAGE_SIZE, row.last_position, most_drafts, number
    stops = *row.stops, *(-1,) * (MOST_STOPS - len(row.stops))
    words[3 * LAID :][: 5 + MOST_STOPS] = (*stand, *stops)
    words[_BLOCK:][: len(row.pages)] = row.pages
    words[_BLOCK + room :] = known
    return words


@dataclass(frozen=True, slots=True)
class Round:
    """The steps of a group, of each way to choose; shortest reach first."""

    plain: tuple[Steps, ...]
    two_pass: tuple[Steps, ...]  # none without a coarse copy of the head
    sampled: tuple[Steps, ...]  # for a sequence that needs the sampling stages


class CapturedRounds:
    """Rounds of every group. Calls go to torch's current stream."""

    def __init__(
        self,
        library: Kernels,
        weights: StepWeights,
        max_context: int,
        future: Future | None = None,
        draft: DeviceDraft | None = None,
    ) -> None:
        self._library = library
        self._weights = weights
        self._max_context = max_context
        self._future = future  # what a draft for measurements knows instead of what was guessed
        self._draft = draft  # None: prompt lookup
        device = weights.table.device
        self._launcher = launcher_of(device)
        self._recorder = Recorder(device)
        self._pages = -(-max_context // PAGE_SIZE)
        self._page_words = -(-self._pages // _BLOCK) * _BLOCK
        tokens = _BLOCK + self._page_words  # where they begin
        self._mail = Mailbox(tokens + max_context, device)
        self._state = state_of(self._mail.arrived[:_BLOCK])
        self._state.newest.fill_(-1)
        room = allocate(weights, LAID, 1, 1)
        choice = replace(room.choice, temperature=self._state.temperature, noise_key=self._state.noise_key)
        places = RowPages(room.places.position, self._mail.arrived[_BLOCK:][: self._pages].view(1, -1))
        self._room: StepBuffers = replace(room, choice=choice, places=places)
        self._verified: Verified = replace(
            speculation.allocate(1, LAID, 1, RING, device),
            history=self._mail.arrived[tokens:].view(1, -1),
            newest=self._state.newest,
            held=self._state.held,
            last_position=self._state.last_position,
            most_drafts=self._state.most_drafts,
            stops=self._state.stops,
            count=self._state.count,
        )
        self._guessing = None if draft is None else DraftSteps(draft.weights, self._verified, choice, places.pages)
        self._ring = words(self._verified.ring)
        self._start: Launch | None = None
        self._sampling = sampling.allocate(LAID, weights.head.rows, device)
        self._draws = False  # whether the sampling stages are needed
        self._rounds: dict[int, Round] = {}  # by group
        self._looks = 0
        self._idle = False  # all that was launched has ended, so its entries are there
        self.graphs = True  # False: launches one by one
        self.two_pass = weights.coarse is not None

    def build(self, groups: Sequence[int] = GROUPS) -> None:
        """Makes the rounds of these groups. Raises BuildError."""
        for group in groups:
            self._rounds[group] = self._chains(group)
        self._start = self._propose().alone()

    def _propose(self) -> Launch:
        library = self._library
        first = first_norm(self._weights, self._room)
        if self._future is None:
            return speculation.lookup(library, self._verified, self._room.places, first)
        return speculation.replay(library, self._verified, self._room.places, first, self._future)

    def _guess(self, plan: ChainPlan, count: int) -> list[Launch]:
        """What lays out a draft of so many tokens in front of the step that verifies them."""
        if self._guessing is None:
            return []
        laid = self._propose()
        if self._future is None:
            first = first_norm(self._weights, self._room)
            laid = self._guessing.drafted(self._library, self._room.places, first, count)
        return self._guessing.launches(self._library, plan, count, laid)

    def _chains(self, group: int) -> Round:
        library, gpu = self._library, self._library.gpu
        buffers = self._room.first(group)
        accept = speculation.accept(library, buffers.choice, self._verified, self._room.places, group)
        ending = (accept,) if self._guessing else (accept, self._propose())
        lengths = [reach for reach in REACHES if reach < self._max_context] + [self._max_context]

        plan = ChainPlan(gpu.multiprocessors, dependent=gpu.overlap, group=group, resident=_RESIDENT)
        plans = [replace(plan, longest=longest) for longest in lengths]
        layers = [prepare_layers(library, self._weights, buffers, each) for each in plans]

        def reaches(how: Sampling | None, *, two_pass: bool = False) -> tuple[Steps, ...]:
            found = []
            for longest, each, common in zip(lengths, plans, layers, strict=True):
                each = replace(each, two_pass=two_pass)
                chain = prepare_step(library, self._weights, buffers, each, how, ending, common)
                found.append(Steps(longest, (*self._guess(each, group - 1), *chain), {}))
            return distinct(found)

        return Round(
            plain=reaches(None),
            two_pass=() if self._weights.coarse is None else reaches(None, two_pass=True),
            sampled=reaches(self._sampling.first(group)),
        )

    def warmup(self, progress: Progress) -> None:
        """Compiles and captures everything, and does each thing once: first times take milliseconds."""
        gc.collect()  # a graph that is dropped during a capture would spoil it
        progress("kernels", 0, 1)
        self.build()
        progress("kernels", 1, 1)
        made = self._rounds.values()
        wanted = [steps for each in made for steps in (*(each.two_pass or each.plain), *each.sampled)]
        for done, steps in enumerate(wanted):
            progress("graphs", done, len(wanted))
            self._graph(steps).replay()
        nobody = self._mail.arrived[:_BLOCK].cpu().numpy()
        for _ in range(2):  # both of its slots
            self._mail.send(nobody)
        for pages in ([0], [0, 0]):
            self.add_pages(0, pages)
        self._enqueue_start()
        self._sampling.rehearse()
        torch.cuda.synchronize()
        progress("graphs", len(wanted), len(wanted))

    def seconds(self, group: int) -> float:
        """What a round of this group costs sequences of some lengths on average, where one token is right; in a row.
        Overwrites the first page."""
        return sum(self._seconds(group, min(at, self._max_context // 2)) for at in _TYPICAL) / len(_TYPICAL)

    def _seconds(self, group: int, at: int) -> float:
        event: type[torch.cuda.Event] = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        found = []
        for _ in range(_TIMINGS):
            longest = self._pretend(at)
            begin.record()
            for _ in range(_TOGETHER):
                self.launch(group, longest)
            end.record()
            end.synchronize()
            found.append(float(begin.elapsed_time(end)) / 1e3 / _TOGETHER)
        self._state.newest.fill_(-1)
        return min(found)

    def _pretend(self, at: int) -> int:
        """Places a sequence of nobody's; how many tokens it may come to hold."""
        state = self._state
        self._mail.arrived.zero_()
        state.stops.fill_(-1)
        for part, value in ((state.newest, at), (state.held, self._max_context), (state.most_drafts, LAID - 1)):
            part.fill_(value)
        state.last_position.fill_(self._max_context)
        self._enqueue_start()
        return min(at + (_TOGETHER + 1) * LAID, self._max_context)

    def _graph(self, steps: Steps) -> torch.cuda.CUDAGraph:
        found = steps.graphs.get(1)
        if found is None:
            found = steps.graphs[1] = self._recorder.record(lambda: self._launcher.enqueue(steps.chain))
        return found

    def _enqueue_start(self) -> None:
        if self._start is None:
            raise EngineFailed("no round was built")
        self._launcher.enqueue([self._start])

    def write(self, row: RowState, most_drafts: int, number: int) -> None:
        """This row and no other."""
        known = np.array([*row.sequence.token_ids, *row.unreported], dtype=np.int32)
        vocabulary = self._weights.table.shape[0]
        if not 0 <= row.token < vocabulary or known.max() >= vocabulary or known.min() < 0:
            # The lookup itself would take the whole process down.
            raise EngineFailed("a token id lies outside the vocabulary")
        if number == 0:
            torch.cuda.synchronize()
            self._verified.ring.zero_()
        if self._draft is not None:
            self._draft.compute(row.sequence, row.position - 1)
        self._mail.send(laid_out(row, most_drafts, number, self._page_words, known))
        self._draws = sampled.needed(row.sequence, len(row.unreported))
        for at in range(LAID if self._draws else 0):
            sampled.place(self._sampling, at, row.sequence, row.unreported)
        self._enqueue_start()

    def add_pages(self, first: int, pages: Sequence[int]) -> None:
        """Pages [first, …) of the row. Its draft is made again: the one laid out was cut where pages ended."""
        self._send_pages(first, pages)
        self._state.held.fill_((first + len(pages)) * PAGE_SIZE)
        self._enqueue_start()

    def _send_pages(self, first: int, pages: Sequence[int]) -> None:
        table = self._room.places.pages[0]
        if len(pages) == 1:
            table[first].fill_(pages[0])
        else:
            table[first : first + len(pages)].copy_(torch.tensor(pages, dtype=torch.int32), non_blocking=True)

    def launch(self, group: int, longest: int) -> None:
        """A round of so many rows."""
        self._idle = False
        made = self._rounds[group]
        plain = made.two_pass if self.two_pass and made.two_pass else made.plain
        steps = next(steps for steps in (made.sampled if self._draws else plain) if steps.longest >= longest)
        if self.graphs:
            self._graph(steps).replay()
        else:
            self._launcher.enqueue(steps.chain)

    def poll(self, number: int) -> int | None:
        """proposed << 28 | flags << 24 | token of the entry, None where it has not come."""
        return told(self._ring, 0, number)

    def wait(self) -> None:
        """A moment. Raises where nothing is under way."""
        if self._idle:
            raise EngineFailed("the device ended its rounds without a token")
        self._looks += 1
        if self._looks % _LOOKS:
            time.sleep(_NAP)
        else:
            self._idle = torch.cuda.current_stream().query()  # raises what went wrong on the device

    def close(self) -> None:
        """Gives the graphs back."""
        torch.cuda.synchronize()
        self._rounds.clear()
