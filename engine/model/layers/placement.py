"""Chooses where in memory the vectors of a step lie. Every block of a product reads the same vector at the same moment,
and which parts of the L2 answer follows from its address, by a rule that GPUs do not reveal: the same launches take up
to 8 % longer or shorter. Results do not depend on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from engine.kernels.build import Kernels
from engine.kernels.capture import Graphs, device_seconds
from engine.kernels.launch import Enqueues, Launch
from engine.model.layers.few_rows import ChainPlan, StepBuffers, StepWeights, prepare_layers
from engine.settings import PAGE_SIZE

PLACES = 6  # that are tried of each vector
TOKENS = 1000  # before the one that is fed, where a context may hold so many
_MOVES: tuple[Callable[[StepBuffers], StepBuffers], ...] = (
    lambda held: replace(held, inner=torch.zeros_like(held.inner)),
    lambda held: replace(held, attended=torch.zeros_like(held.attended)),
    lambda held: replace(held, stream=replace(held.stream, scaled=torch.zeros_like(held.stream.scaled))),
    lambda held: replace(held, stream=replace(held.stream, squares=torch.zeros_like(held.stream.squares))),
    lambda held: replace(held, scratch=replace(held.scratch, launches=torch.zeros_like(held.scratch.launches))),
    lambda held: replace(held, qkv=torch.zeros_like(held.qkv)),
)
_LAUNCHES = 120  # that are timed together
_READ = 192 << 20  # bytes of weights, so that none comes out of the L2
_TIMES = 4


def settled(buffers: StepBuffers, time: Callable[[StepBuffers], float], places: int = PLACES) -> StepBuffers:
    """Moves each vector in turn to where `time` was the least."""
    best = buffers
    for move in _MOVES:
        # Timed again for every vector: clocks change.
        tried = [best, *(move(best) for _ in range(places))]  # all of them held, so that no two are one place
        times = [time(one) for one in tried]
        best = tried[times.index(min(times))]
    # As new: what launches left in one place says of other launches in another.
    for part in (best.scratch.out, best.scratch.sums, best.scratch.arrivals, best.scratch.launches):
        part.zero_()
    return best


class LayersTimed:
    def __init__(self, library: Kernels, launcher: Enqueues, weights: StepWeights, plan: ChainPlan) -> None:
        layer = weights.layers[0]
        size = sum(one.matrix.nbytes for one in (layer.qkv, layer.output, layer.gate_up, layer.down))
        # Without exchanges: ranks that wait for each other would measure the slower one's place.
        self._weights = replace(weights, layers=weights.layers[: max(1, -(-_READ // size))], channels=None)
        self._library, self._launcher, self._plan = library, launcher, plan
        self._graphs = Graphs(weights.table.device)

    def place_row(self, buffers: StepBuffers) -> None:
        """Fills the first pages of the pool with a row of many tokens."""
        held = min(buffers.places.pages.shape[1], self._weights.layers[0].attention.keys.shape[0])
        buffers.places.pages[:, :held].copy_(torch.arange(held, dtype=torch.int32))
        buffers.places.position.fill_(min(TOKENS, held * PAGE_SIZE - 1, self._weights.angles.shape[0] - 1))

    def take_away(self, buffers: StepBuffers) -> None:
        """Removes the row, and what its steps left in the pool."""
        page = int(buffers.places.position[0]) // PAGE_SIZE
        for layer in self._weights.layers:
            layer.attention.keys[page].zero_()
            layer.attention.values[page].zero_()
        buffers.places.pages.zero_()
        buffers.places.position.fill_(-1)

    def prepare(self, buffers: StepBuffers) -> tuple[Launch, ...]:
        """Raises BuildError where a kernel cannot be had."""
        return prepare_layers(self._library, self._weights, buffers, self._plan)

    def __call__(self, buffers: StepBuffers) -> float:
        """Returns the milliseconds that the first layers take."""
        chain = self.prepare(buffers)

        def enqueue() -> None:
            for _ in range(max(1, _LAUNCHES // len(chain))):
                self._launcher.enqueue(chain)

        graph = self._graphs.record(enqueue)
        graph.replay()
        return 1e3 * min(device_seconds(graph.replay) for _ in range(_TIMES))
