"""What host and device tell each other of the rows of a step: one block that the host writes, and a ring of entries
that the device writes into the host's memory."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from engine.execution.needs import MOST_STOPS
from engine.execution.pipeline import RowState
from engine.model.layers.few_rows import StepBuffers

RING = 64  # entries of a row; more than can be under way
_WORDS = 7 + MOST_STOPS  # of a row


@dataclass(frozen=True, slots=True)
class StateBlock:
    """What the host writes of all rows, as one block: int32 [words, rows]."""

    block: torch.Tensor
    noise_key: torch.Tensor  # int64
    token: torch.Tensor
    position: torch.Tensor
    last_position: torch.Tensor
    count: torch.Tensor
    temperature: torch.Tensor  # float32
    stops: torch.Tensor  # [rows, 8]


def state_of(block: torch.Tensor) -> StateBlock:
    """The parts of a block; views."""
    rows = block.shape[1]
    return StateBlock(
        block=block,
        noise_key=block[:2].view(-1).view(torch.int64),
        token=block[2],
        position=block[3],
        last_position=block[4],
        count=block[5],
        temperature=block[6].view(torch.float32),
        stops=block[7:].view(-1).view(rows, MOST_STOPS),
    )


def fill(rows: Rows[RowState], width: int, number: int) -> torch.Tensor:
    """The block of these rows in the host's memory; those beyond are idle. By numpy, as it is filled before each change
    of rows and torch takes some 5 µs an element."""
    block = np.zeros((_WORDS, width), dtype=np.int32)
    noise_key, temperature = block[:2].reshape(-1).view(np.int64), block[6].view(np.float32)
    stops = block[7:].reshape(width, MOST_STOPS)
    block[3] = stops[:] = -1
    block[5] = number
    for at, row in enumerate(rows):
        noise_key[at] = row.noise_key
        block[2:5, at] = row.token, row.position, row.last_position
        temperature[at] = row.temperature
        stops[at, : len(row.stops)] = row.stops
    return torch.from_numpy(block)


def idle(width: int, device: torch.device) -> StateBlock:
    """Makes the state of `width` idle rows on the device."""
    return state_of(fill((), width, 0).to(device))


def placed(buffers: StepBuffers, state: StateBlock) -> StepBuffers:
    """The buffers with what the host writes moved into one block."""
    places = replace(buffers.places, position=state.position)
    choice = replace(buffers.choice, temperature=state.temperature, noise_key=state.noise_key)
    progress = replace(
        buffers.progress,
        token=state.token,
        last_position=state.last_position,
        stops=state.stops,
        count=state.count,
    )
    return replace(buffers, places=places, choice=choice, progress=progress)


def words(ring: torch.Tensor) -> memoryview:
    """The ring's memory itself."""
    held: Any = ring.view(-1).numpy()
    return memoryview(held).cast("B").cast("q")


def entry_of(ring: memoryview, row: int, number: int, size: int = RING) -> int | None:
    """Returns what the device wrote as that entry of a row; None: it has not come. `size`: entries of a row."""
    entry = ring[row * size + (number - 1) % size]
    return entry & 0xFFFFFFFF if entry >> 32 == number else None
