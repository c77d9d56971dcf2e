"""Runs chains of launches as captured graphs, or launch by launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from engine.kernels.attention import MANY_TOKENS
from engine.kernels.capture import Graphs
from engine.kernels.launch import Launch, launcher_of

# Tokens; attention is launched no wider than the longest row needs, which costs a little, and beyond the last of these
# another way.
REACHES = (512, 1024, MANY_TOKENS)


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A step, or a part of it, whose rows hold at most `longest` tokens."""

    longest: int
    launches: tuple[Launch, ...]


def reaches(max_context: int) -> tuple[int, ...]:
    return *(reach for reach in REACHES if reach < max_context), max_context


def distinct(chains: Sequence[Chain]) -> tuple[Chain, ...]:
    """Leaves out chains that launch the same as the next longer one."""
    longer = [*chains[1:], None]
    return tuple(one for one, other in zip(chains, longer, strict=True) if other is None or not _same(one, other))


def _same(one: Chain, other: Chain) -> bool:
    return all(a.kernel is b.kernel and a.shape == b.shape for a, b in zip(one.launches, other.launches, strict=True))


def fitting(chains: Sequence[Chain], longest: int) -> Chain:
    """Expects the chains in order, shortest first."""
    return next(chain for chain in chains if chain.longest >= longest)


class Chains:
    """Enqueues chains on torch's current stream, and holds their graphs."""

    def __init__(self, device: torch.device) -> None:
        self.launcher = launcher_of(device)
        self.graphs = Graphs(device)

    def run(self, chain: Chain, *, captured: bool, times: int = 1) -> None:
        if captured:
            self.capture(chain, times).replay()
        else:
            self._enqueue(chain, times)

    def capture(self, chain: Chain, times: int = 1) -> torch.cuda.CUDAGraph:
        return self.graphs.capture((chain, times), partial(self._enqueue, chain, times))

    def _enqueue(self, chain: Chain, times: int) -> None:
        for _ in range(times):
            self.launcher.enqueue(chain.launches)
