"""A grammar that knows only how many tokens were said, in place of the library: which token may be the next one, and
which are forced, is known without it."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import torch

from engine.constraints.constraints import Constraints
from engine.constraints.grammars import Grammars

FORCED = (5, 6, 7)  # of every eleven tokens


def allowed(said: int, vocabulary: int, stops: Items[int] = ()) -> torch.Tensor:
    """bool [vocabulary]: what may follow so many tokens."""
    ids = torch.arange(vocabulary)
    found = ids == said * 13 % vocabulary if said % 11 in FORCED else (ids * 31 + said * 17) % 7 < 3
    found[list(stops)] = _may_end(said)
    return found


def _may_end(said: int) -> bool:
    return said % 11 not in FORCED and said % 3 == 2


class CountingMatcher:
    """As `llguidance.LLMatcher`. `end`: after so many tokens nothing may follow, and the answer is whole or not."""

    def __init__(self, vocabulary: int, end: int = -1, whole: bool = True) -> None:
        self._vocabulary, self._end, self._whole = vocabulary, end, whole
        self._said = 0

    def deep_copy(self) -> CountingMatcher:
        return CountingMatcher(self._vocabulary, self._end, self._whole)

    def compute_bitmask(self) -> bytes:
        bits = [*allowed(self._said, self._vocabulary).tolist(), _may_end(self._said)]
        return np.packbits(np.array(bits) & (self._said != self._end), bitorder="little").tobytes()

    def consume_tokens(self, ids: Items[int]) -> bool:
        for token in ids:
            assert allowed(self._said, self._vocabulary)[token]
            self._said += 1
        return True

    def try_consume_tokens(self, ids: Items[int]) -> int:
        """As many of them as may come."""
        for at, token in enumerate(ids):
            if self._said == self._end or not allowed(self._said, self._vocabulary)[token]:
                return at
            self._said += 1
        return len(ids)

    def rollback(self, count: int) -> None:
        self._said -= count

    def compute_ff_tokens(self) -> list[int]:
        found = []
        while (at := self._said + len(found)) % 11 in FORCED and at != self._end:
            found.append(at * 13 % self._vocabulary)
        return found

    def is_error(self) -> bool:
        return False

    def is_accepting(self) -> bool:
        return self._said == self._end and self._whole

    def is_stopped(self) -> bool:
        return False


class CountingGrammars(Grammars):
    """Grammars are "", or where the answer ends and whether it is whole there: "9 whole", "9 torn"."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__("")
        self._size = vocabulary

    def matcher(self, grammar: str) -> Any:
        end, kind = grammar.split() if grammar else ("-1", "")
        return CountingMatcher(self._size, int(end), kind == "whole")

    def vocabulary(self) -> tuple[Any, int]:
        return None, self._size


def counting(vocabulary: int) -> Constraints:
    """For a model of so many tokens."""
    return Constraints(grammars=CountingGrammars(vocabulary))
