"""What the host writes of rows: their state, pages and tokens, and masks of tokens."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from engine.execution.needs import MOST_STOPS
from engine.execution.pipeline import RowState
from engine.model.layers.draft_steps import DRAFT_ROWS, Draws
from engine.model.layers.few_rows import StepBuffers
from engine.settings import PAGE_SIZE

_FIELDS = 6  # of a sequence: SequenceStates from `token` to `count`
_NO_TOKENS = np.empty(0, dtype=np.int32)
_EVEN = 64  # words; what begins at a multiple of 256 bytes lies as memory of its own would


def _even(words: int) -> int:
    return -(-words // _EVEN) * _EVEN


@dataclass(frozen=True, slots=True)
class SequenceStates:
    draws: tuple[Draws, ...]  # of a verifying step's rows, and of each kind of a draft model's steps (DRAFT_ROWS)
    token: torch.Tensor  # int32 [sequences], and those after it; to be fed, of plain rows
    newest: torch.Tensor  # its position
    held: torch.Tensor
    last_position: torch.Tensor
    most_drafts: torch.Tensor
    count: torch.Tensor
    stops: torch.Tensor  # [sequences, 8]


class RowLayout:
    """Where state, pages and tokens of `sequences` sequences lie in one array of words. Plain rows have state alone."""

    def __init__(self, sequences: int, laid: int = 1, most_tokens: int = 0) -> None:
        """`laid`: rows that are laid out for each, of whatever group the next launch is. `most_tokens`: of each."""
        self.sequences, self.laid, self.most_tokens = sequences, laid, most_tokens
        self.rows = sequences * laid
        # Rows of a sequence that draw in its own step, and in those of a draft model; and where each kind begins.
        self._drawing = (laid, *DRAFT_ROWS) if laid > 1 else (1,)
        self._kinds = tuple(accumulate((sequences * each for each in self._drawing), initial=0))
        self._stands = 3 * self._kinds[-1]  # words before those of sequences: three for each row that draws
        self.block = _even(self._stands + (_FIELDS + MOST_STOPS) * sequences)  # words, behind which pages lie
        self.most_pages = _even(-(-most_tokens // PAGE_SIZE))
        self.tokens = self.block + sequences * self.most_pages
        self.size = self.tokens + sequences * most_tokens

    def state(self, words: torch.Tensor) -> SequenceStates:
        kinds, first, each = self._kinds, self._stands, self.sequences
        keys, temperatures = words[: 2 * kinds[-1]].view(torch.int64), words[2 * kinds[-1] : first].view(torch.float32)
        fields = words[first : first + _FIELDS * each].view(_FIELDS, each)
        return SequenceStates(
            tuple(Draws(keys[a:b], temperatures[a:b]) for a, b in pairwise(kinds)),
            *(fields[0], fields[1], fields[2], fields[3], fields[4], fields[5]),
            stops=words[first + _FIELDS * each :][: each * MOST_STOPS].view(each, MOST_STOPS),
        )

    def pages(self, words: torch.Tensor) -> torch.Tensor:
        """Returns the table [sequences, most_pages]."""
        return words[self.block : self.tokens].view(self.sequences, -1)

    def history(self, words: torch.Tensor) -> torch.Tensor:
        """Returns token ids [sequences, most_tokens]."""
        return words[self.tokens : self.size].view(self.sequences, -1)

    def of(
        self, rows: Rows[RowState], number: int, known: Rows[NDArray[np.int32]] = (_NO_TOKENS,)
    ) -> NDArray[np.int32]:
        """Returns the words of these rows, with the tokens `known` of the first one alone: the others are sent to
        places of their own. Rows beyond are idle. By numpy: torch takes 5 µs an element, and launches wait for it."""
        words = np.zeros(self.tokens + len(known[0]), dtype=np.int32)
        kinds, first, each = self._kinds, self._stands, self.sequences
        keys, temperatures = words[: 2 * kinds[-1]].view(np.int64), words[2 * kinds[-1] : first].view(np.float32)
        fields = words[first:][: _FIELDS * each].reshape(_FIELDS, each)
        stops = words[first + _FIELDS * each :][: each * MOST_STOPS].reshape(-1, MOST_STOPS)
        fields[1] = stops[:] = -1
        fields[5] = number
        pages = words[self.block : self.tokens].reshape(each, -1)
        for at, row in enumerate(rows):
            for begin, count in zip(kinds, self._drawing, strict=False):
                mine = slice(begin + at * count, begin + (at + 1) * count)
                keys[mine], temperatures[mine] = row.noise_key, row.temperature
            held = len(row.pages) * PAGE_SIZE
            fields[:5, at] = row.token, row.position, held, row.last_position, row.most_drafts
            stops[at, : len(row.stops)] = row.stops
            if self.most_tokens:
                pages[at, : len(row.pages)] = row.pages
        words[self.tokens :] = known[0]
        return words

    def others(self, known: Rows[NDArray[np.int32]]) -> list[tuple[int, NDArray[np.int32]]]:
        """Returns the tokens of all rows but the first, each with its place."""
        return [(self.tokens + at * self.most_tokens, ids) for at, ids in enumerate(known)][1:]


class PlainRows:
    """The state of `width` plain rows on the device; idle at first."""

    def __init__(self, width: int, device: torch.device) -> None:
        self._layout = RowLayout(width)
        self._words = torch.from_numpy(self._layout.of((), 0)).to(device)
        self.state = self._layout.state(self._words)

    def write(self, rows: Rows[RowState], number: int) -> None:
        """Enqueues the state of these rows; those beyond are idle."""
        self._words.copy_(torch.from_numpy(self._layout.of(rows, number)), non_blocking=True)

    def placed(self, buffers: StepBuffers) -> StepBuffers:
        """Replaces what the host writes of the rows by this state."""
        state, draws = self.state, self.state.draws[0]
        places = replace(buffers.places, position=state.newest)
        choice = replace(buffers.choice, temperature=draws.temperature, noise_key=draws.noise_key)
        progress = replace(
            buffers.progress,
            token=state.token,
            last_position=state.last_position,
            stops=state.stops,
            count=state.count,
        )
        return replace(buffers, places=places, choice=choice, progress=progress)


def write_pages(table: torch.Tensor, first: int, pages: Rows[int]) -> None:
    """Enqueues table[first : first + len(pages)] = pages."""
    if len(pages) == 1:  # most often, and no memory is copied
        table[first].fill_(pages[0])
    else:
        table[first : first + len(pages)].copy_(torch.tensor(pages, dtype=torch.int32), non_blocking=True)
