"""Measures, once on this machine and model, what a step costs by the tokens that it feeds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

SIZES: Final = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)  # tokens
_CONTEXT = 512  # tokens that stand before those fed: attention to them makes each row dearer
Clock = Callable[[], float]  # seconds
_REPEATS = 10  # the best of them counts, since others use the machine too
_SMALL, _SELDOM = 8, 5  # tokens of one sequence's launch; larger steps take long, and are repeated one time in so many
_PATIENCE = 2.0  # seconds, after which no more is tried


class Costs:
    """Interpolates the seconds of a step between measured sizes; beyond them, the last line goes on."""

    def __init__(self, known: dict[int, float]) -> None:
        """`known` includes size 1. Other load only lengthens steps, so none is taken to cost more than a larger one."""
        self._sizes = sorted(known)
        self._seconds = [min(known[larger] for larger in self._sizes[at:]) for at in range(len(self._sizes))]
        self._table = [self._between(max(tokens, 1)) for tokens in range(SIZES[-1] + 1)]  # asked for in every step

    def seconds(self, tokens: int) -> float:
        return self._table[tokens] if tokens < len(self._table) else self._between(tokens)

    def _between(self, tokens: int) -> float:
        sizes, seconds = self._sizes, self._seconds
        above = next((at for at, size in enumerate(sizes) if size >= tokens), len(sizes) - 1)
        if sizes[above] == tokens or len(sizes) == 1:
            return seconds[above] * (1.0 if sizes[above] >= tokens else tokens / sizes[above])
        below = above - 1
        slope = (seconds[above] - seconds[below]) / (sizes[above] - sizes[below])
        if tokens > sizes[above]:
            # No line is flatter than a token of the widest step, so that nothing is free where nothing was measured.
            return seconds[above] + (tokens - sizes[above]) * max(slope, seconds[above] / sizes[above])
        return seconds[below] + (tokens - sizes[below]) * slope


def measure(
    step: Callable[[int, int], None], most: int, clock: Clock, between: Callable[[], None] = lambda: None
) -> Costs:
    """`step(tokens, before)` feeds tokens behind others, together at most `most`. `between` is not timed."""
    known: dict[int, float] = {}
    before = max(0, min(_CONTEXT, most - SIZES[-1]))
    began = time.perf_counter()
    for size in SIZES:
        if before + size > most or time.perf_counter() - began > _PATIENCE:
            break
        step(size, before)  # what is set up at a first call
        between()
        known[size] = _timed(step, size, before, clock)
    # Size after size each time, so that what is slow for a while is slow for all; the largest first, since a step whose
    # numbers have pushed the weights out of a CPU's caches makes the one after it longer.
    for repeat in range(_REPEATS):
        for size in reversed([size for size in known if size <= _SMALL or repeat % _SELDOM == 0]):
            if time.perf_counter() - began > _PATIENCE:
                break
            between()
            known[size] = min(known[size], _timed(step, size, before, clock))
    return Costs(known)


def clock_of(device: torch.device, alone: bool = True) -> Clock:
    """Prefers the clock of a thread that does all the work: other load does not disturb it. `alone`: no other process
    has a part of it."""
    alone = alone and device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def _timed(step: Callable[[int, int], None], size: int, before: int, clock: Clock) -> float:
    began = clock()
    step(size, before)
    return clock() - began
