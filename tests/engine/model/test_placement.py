"""Which of several places a step's vectors take."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch

from engine.kernels.build import WantedKernels
from engine.kernels.gpu import GpuShape
from engine.kernels.launch import Unlaunched
from engine.model.layers.few_rows import ChainPlan, StepBuffers, allocate
from engine.model.layers.placement import LayersTimed, settled
from engine.settings import PAGE_SIZE
from tests.engine.kernels.conftest import small_model

PLACES = 5


def vectors(buffers: StepBuffers) -> dict[str, torch.Tensor]:
    """Those that may move."""
    return {
        "inner": buffers.inner,
        "attended": buffers.attended,
        "scaled": buffers.stream.scaled,
        "squares": buffers.stream.squares,
        "launches": buffers.scratch.launches,
        "qkv": buffers.qkv,
    }


class Slowness:
    """Times that follow from addresses; each vector's own are the less the later it was seen, but for the first."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int], float] = {}

    def __call__(self, buffers: StepBuffers) -> float:
        total = 0.0
        for name, vector in vectors(buffers).items():
            total += self.seen.setdefault((name, vector.data_ptr()), 1000.0 - 7.0 * (len(self.seen) % 11))
        return total


def test_each_vector_lies_in_the_fastest_of_its_places() -> None:
    buffers, slowness = allocate(small_model("bf16"), 1, 4, 64), Slowness()
    found = settled(buffers, slowness, PLACES)
    for name, vector in vectors(found).items():
        tried = [time for (other, _), time in slowness.seen.items() if other == name]
        assert len(tried) == PLACES + 1
        assert slowness.seen[name, vector.data_ptr()] == min(tried)


def test_where_the_first_places_are_the_fastest_they_stay() -> None:
    buffers = allocate(small_model("bf16"), 1, 4, 64)
    first = {name: vector.data_ptr() for name, vector in vectors(buffers).items()}
    found = settled(
        buffers, lambda held: sum(first[name] != one.data_ptr() for name, one in vectors(held).items()), PLACES
    )
    assert {name: vector.data_ptr() for name, vector in vectors(found).items()} == first


def test_all_else_stays_and_nothing_of_the_launches_is_left() -> None:
    buffers = allocate(small_model("bf16"), 1, 4, 64)

    def launched(held: StepBuffers) -> float:
        for part in (held.scratch.out, held.scratch.sums, held.scratch.launches):
            part.fill_(3)
        return -float(held.inner.data_ptr() % 977)

    found = settled(buffers, launched, PLACES)
    assert not any(part.any() for part in (found.scratch.out, found.scratch.sums, found.scratch.launches))
    moved = {vector.data_ptr() for vector in vectors(found).values()}
    before, after = tensors(buffers), tensors(found)
    assert [(one.shape, one.dtype) for one in before] == [(one.shape, one.dtype) for one in after]
    assert all(one is other for one, other in zip(before, after, strict=True) if other.data_ptr() not in moved)


def tensors(part: Any) -> list[torch.Tensor]:
    """All that a dataclass of dataclasses holds, in order."""
    if isinstance(part, torch.Tensor):
        return [part]
    return [one for each in fields(part) for one in tensors(getattr(part, each.name))] if is_dataclass(part) else []


def test_the_row_that_is_timed_leaves_nothing_behind() -> None:
    weights = small_model("bf16")
    buffers = allocate(weights, 1, 4, 64)
    pool = [part for layer in weights.layers for part in (layer.attention.keys, layer.attention.values)]
    wanted = WantedKernels(GpuShape(132, 227 << 10, warpgroups=True, overlap=True))
    timed = LayersTimed(wanted, Unlaunched(), weights, ChainPlan(132))
    timed.place_row(buffers)
    position = int(buffers.places.position[0])
    assert buffers.places.pages[0].tolist() == [0, 1, 2, 3]
    assert position == 4 * PAGE_SIZE - 1
    for part in pool:
        part[position // PAGE_SIZE] = float("nan")
    timed.take_away(buffers)
    assert int(buffers.places.position[0]) == -1
    assert not buffers.places.pages.any()
    assert not any(part.any() for part in pool)
