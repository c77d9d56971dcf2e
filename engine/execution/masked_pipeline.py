"""Launches steps in which some row has a constraint: the layers, and then the choice of tokens. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from typing import Protocol

from engine.execution.pipeline import (
    FLAGS,
    NO_TOKEN,
    TOKEN,
    Half,
    HeldRow,
    Mask,
    Pipeline,
    RowDevice,
    StepLaunch,
)
from engine.execution.router import ALL_OPTIONS, StepOptions
from engine.scheduling.plan import Row, RowResult
from engine.scheduling.sequence_state import SequenceTable
from engine.settings import PAGE_SIZE


class Grammar(Protocol):
    def mask(self, key: int) -> Mask:
        """Returns the mask of the sequence's next token, after a brief wait at most."""

    def ready(self, key: int) -> bool:
        """Returns whether the next token's mask is there or worth a brief wait."""

    def take(self, rows: Rows[Row], found: dict[int, RowResult]) -> dict[int, RowResult]:
        """Moves constraints on by these tokens. Returns the tokens, and behind them those that a constraint forces."""


class MaskedPipeline(Pipeline):
    """Splits a step into two launches: the layers, and the choice of tokens.

    The choice needs masks, which the host makes once it knows the tokens before. So the next step's layers are launched
    before this step's tokens are read: the device waits for no mask that comes before they end. Where rows change, an
    unread choice is made again: choices depend on seed and position alone."""

    def __init__(self, device: RowDevice, sequences: SequenceTable, max_context: int, grammar: Grammar) -> None:
        super().__init__(device, sequences, max_context)
        self._grammar = grammar
        self._fed = False  # the layers of the next choice are launched
        self._chosen = False  # a choice is in flight

    def masked_step(self, rows: Rows[Row], options: StepOptions = ALL_OPTIONS) -> dict[int, RowResult]:
        """Returns at most one id for each row, and what its constraint forces behind it."""
        try:
            held = self._current(rows, ())
            if held is None:
                self._held, self._fed, self._chosen = {}, False, False
                held = self._rewrite(rows, {}, ())
            else:
                self._extend(held)
            if not self._chosen:
                self._choose(held, options)
            found = self._grammar.take(rows, self._read_choice(held))
            if self._same_go_on(held, found):
                self._choose(held, options)  # before the tokens before it are handed on
            return found
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        super().leave()
        self._bucket = 0

    def _choose(self, held: Rows[HeldRow], options: StepOptions) -> None:
        if not self._fed:
            self._feed([own.stands for own in held], options)
        masks = {own.index: self._grammar.mask(own.sequence.key) for own in held if own.sequence.constraint is not None}
        self._entries += 1
        self._device.launch(StepLaunch(half=Half(masks), options=options))
        self._chosen = True
        after = [own.stands + 1 for own in held if own.stands + 1 < own.last]
        self._fed = bool(after) and all(
            own.stands + 1 < own.pages * PAGE_SIZE or own.stands + 1 >= own.last for own in held
        )
        if self._fed:
            self._feed(after, options)

    def _feed(self, positions: Rows[int], options: StepOptions) -> None:
        self._device.launch(StepLaunch(1 + max(positions), half=Half(), options=options))

    def _same_go_on(self, held: Rows[HeldRow], found: Mapping[int, RowResult]) -> bool:
        one_each = all(len(result.token_ids) == 1 and result.end is None for result in found.values())
        if not self._fed or not one_each or any(own.ended for own in held):
            return False
        return all(self._grammar.ready(own.sequence.key) for own in held)

    def _read_choice(self, held: Rows[HeldRow]) -> dict[int, RowResult]:
        self._chosen = False
        found: dict[int, RowResult] = {}
        for own in held:
            own.number += 1
            while (entry := self._device.poll(own.index, own.number)) is None:
                self._device.wait()
            flags = entry >> 24 & FLAGS
            own.stands += 1
            own.ended = flags != 0
            found[own.sequence.key] = RowResult(() if flags & NO_TOKEN else (entry & TOKEN,))
        return found
