"""A draft model's guesses as launches of the walk of few rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

import torch

from engine.kernels import speculation
from engine.kernels.attention import RowPages
from engine.kernels.build import Kernels
from engine.kernels.launch import Launch
from engine.kernels.speculation import Guessing, Verified
from engine.kernels.tokens import FirstNorm
from engine.model.layers.few_rows import (
    ChainPlan,
    StepBuffers,
    StepWeights,
    allocate,
    first_norm,
    prepare_layers,
    prepare_step,
)

DRAFT_ROWS: Final = (2, 1)  # of a sequence in a draft model's first step, and in its others


class Draws(NamedTuple):
    """What rows choose by; all of a sequence alike."""

    noise_key: torch.Tensor  # int64 [rows]
    temperature: torch.Tensor  # float32 [rows]


class DraftSteps:
    """The steps of a draft model in front of the step that verifies what they guess, and their memory."""

    def __init__(self, weights: StepWeights, state: Verified, draws: tuple[Draws, ...], pages: torch.Tensor) -> None:
        """`draws`: what the rows of each kind of step choose by. `pages`: the target's table, a line a sequence."""
        self._weights = weights
        self._state = state
        sequences = pages.shape[0]
        room = allocate(weights, sequences * DRAFT_ROWS[0], 1, 1)
        room = replace(room, places=RowPages(room.places.position, pages))
        self._rooms: dict[int, StepBuffers] = {}  # by rows of a sequence
        for rows, each in zip(DRAFT_ROWS, draws, strict=True):
            part = room.first(sequences * rows)
            choice = replace(part.choice, temperature=each.temperature, noise_key=each.noise_key)
            self._rooms[rows] = replace(part, choice=choice)
        guesses = torch.full((sequences, state.laid - 1), -1, dtype=torch.int32, device=pages.device)
        self._guessing = Guessing(room.choice, room.places, first_norm(weights, room), guesses)

    def launches(self, library: Kernels, how: ChainPlan, count: int, ending: Launch) -> list[Launch]:
        """`count` guesses; `ending` lays out the target's rows."""
        found = [speculation.follow(library, self._state, self._guessing)] if count else [ending]
        found = [one.with_trigger(how.trigger) for one in found]
        layers: dict[int, tuple[Launch, ...]] = {}  # by rows
        for number in range(1, count + 1):
            rows = self._rows(number)
            taken = ending
            if number < count:
                taken = speculation.guess(library, self._state, self._guessing, rows, number)
            plan = replace(how, group=rows, two_pass=self._weights.coarse is not None)
            room = self._rooms[rows]
            if rows not in layers:
                layers[rows] = prepare_layers(library, self._weights, room, plan)
            found += prepare_step(library, self._weights, room, plan, None, (taken,), layers[rows])
        return found if how.dependent else [one.alone() for one in found]

    def drafted(self, library: Kernels, places: RowPages, first: FirstNorm, count: int) -> Launch:
        """Lays out the target's rows: the newest token and `count` guesses."""
        return speculation.drafted(library, self._state, places, first, self._guessing, self._rows(count), count)

    @staticmethod
    def _rows(number: int) -> int:
        """Returns the rows of a sequence in the step that makes guess `number`: the two newest tokens, or the last
        guess."""
        return DRAFT_ROWS[number > 1]
