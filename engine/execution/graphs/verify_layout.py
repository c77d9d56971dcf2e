"""How what the host writes of the rows of rounds lies in the device's memory: one block of all that is short, pages,
tokens."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.execution.needs import MOST_STOPS
from engine.execution.pipeline import RowState
from engine.settings import PAGE_SIZE

DRAFT_ROWS: Final = (2, 1)  # of a sequence in a draft model's first step, and in its others
_EVEN = 64  # words; what begins at a multiple of 256 bytes lies as memory of its own would


def _even(words: int) -> int:
    return -(-words // _EVEN) * _EVEN


class Draws(NamedTuple):
    """What rows choose by; all of a sequence alike."""

    noise_key: torch.Tensor  # int64 [rows]
    temperature: torch.Tensor  # float32 [rows]


@dataclass(frozen=True, slots=True)
class SequenceStates:
    """What the host writes of sequences, beside their pages and tokens."""

    draws: tuple[Draws, ...]  # of a verifying step's rows, and of each kind of a draft model's steps (DRAFT_ROWS)
    newest: torch.Tensor  # int32 [sequences], and those after it
    held: torch.Tensor
    last_position: torch.Tensor
    most_drafts: torch.Tensor
    count: torch.Tensor
    stops: torch.Tensor  # [sequences, 8]


@dataclass(frozen=True, slots=True)
class VerifyLayout:
    """The words of `sequences` sequences, each with rows for its newest token and the longest draft."""

    sequences: int
    laid: int  # rows that are laid out for each, of whatever group the next round is
    most_tokens: int  # of a sequence

    @property
    def rows(self) -> int:
        return self.sequences * self.laid

    @property
    def _kinds(self) -> tuple[int, ...]:
        """Where the rows of each kind of step begin among all that draw, and where they end."""
        return tuple(accumulate((self.sequences * each for each in (self.laid, *DRAFT_ROWS)), initial=0))

    @property
    def _stands(self) -> int:
        """Words before those of sequences: three for each row that draws."""
        return 3 * self._kinds[-1]

    @property
    def block(self) -> int:
        """Words of the block, behind which pages lie."""
        return _even(self._stands + (5 + MOST_STOPS) * self.sequences)

    @property
    def most_pages(self) -> int:
        """Returns the pages of a sequence, rounded up: each sequence has a line of the table."""
        return _even(-(-self.most_tokens // PAGE_SIZE))

    @property
    def tokens(self) -> int:
        """Returns the word at which the token ids begin."""
        return self.block + self.sequences * self.most_pages

    @property
    def size(self) -> int:
        return self.tokens + self.sequences * self.most_tokens

    def state(self, words: torch.Tensor) -> SequenceStates:
        """The parts of int32 [size]; views."""
        kinds, first, each = self._kinds, self._stands, self.sequences
        keys, temperatures = words[: 2 * kinds[-1]].view(torch.int64), words[2 * kinds[-1] : first].view(torch.float32)
        newest, held, last_position, most_drafts, count = (words[first + at * each :][:each] for at in range(5))
        return SequenceStates(
            draws=tuple(Draws(keys[a:b], temperatures[a:b]) for a, b in pairwise(kinds)),
            newest=newest,
            held=held,
            last_position=last_position,
            most_drafts=most_drafts,
            count=count,
            stops=words[first + 5 * each :][: each * MOST_STOPS].view(each, MOST_STOPS),
        )

    def pages(self, words: torch.Tensor) -> torch.Tensor:
        """The table [sequences, most_pages]; a view."""
        return words[self.block : self.tokens].view(self.sequences, -1)

    def history(self, words: torch.Tensor) -> torch.Tensor:
        """Token ids [sequences, most_tokens]; a view."""
        return words[self.tokens : self.size].view(self.sequences, -1)

    def of(self, rows: Rows[RowState], number: int, known: Rows[NDArray[np.int32]]) -> NDArray[np.int32]:
        """What the device is sent of these rows, whose tokens are `known`; those of the first at its end, and of the
        others not: each has a place of its own for them."""
        words = np.zeros(self.tokens + len(known[0]), dtype=np.int32)
        kinds, first, each = self._kinds, self._stands, self.sequences
        keys, temperatures = words[: 2 * kinds[-1]].view(np.int64), words[2 * kinds[-1] : first].view(np.float32)
        stands = words[first:][: 5 * each].reshape(5, each)
        stands[0] = -1
        stops = words[first + 5 * each :][: each * MOST_STOPS].reshape(-1, MOST_STOPS)
        stops[:] = -1
        pages = words[self.block : self.tokens].reshape(self.sequences, -1)
        for at, row in enumerate(rows):
            for begin, count in zip(kinds, (self.laid, *DRAFT_ROWS), strict=False):
                mine = slice(begin + at * count, begin + (at + 1) * count)
                keys[mine], temperatures[mine] = row.noise_key, row.temperature
            stands[:, at] = row.position, len(row.pages) * PAGE_SIZE, row.last_position, row.most_drafts, number
            stops[at, : len(row.stops)] = row.stops
            pages[at, : len(row.pages)] = row.pages
        words[self.tokens :] = known[0]
        return words

    def others(self, known: Rows[NDArray[np.int32]]) -> list[tuple[int, NDArray[np.int32]]]:
        """Where the tokens of rows but the first go, and they."""
        return [(self.tokens + at * self.most_tokens, ids) for at, ids in enumerate(known)][1:]
