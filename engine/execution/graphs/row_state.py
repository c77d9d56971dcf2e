"""The state of rows that host and device share: blocks that the host writes, of plain rows and of sequences with
drafts, and masks of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.execution.needs import MOST_STOPS
from engine.execution.pipeline import Mask, RowState
from engine.kernels.capture import Mailbox
from engine.model.layers.few_rows import StepBuffers
from engine.settings import PAGE_SIZE

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
    laid: int  # rows that are laid out for each, of whatever group the next launch is
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


_OPEN = -1  # a word that allows all its tokens


class TokenMasks:
    """The masks of `rows` rows at a fixed address. At first they allow every token."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self._words = np.full((rows, -(-vocabulary // 32)), _OPEN, dtype=np.int32)
        self._mailbox = Mailbox(self._words.size, device)
        self._mailbox.arrived.fill_(_OPEN)
        self._masked: set[int] = set()  # rows that are not open

    @property
    def arrived(self) -> torch.Tensor:
        """Returns the masks, int32 [rows, words]."""
        return self._mailbox.arrived.view(self._words.shape)

    def send(self, masks: Mapping[int, Mask]) -> None:
        """Sets the masks of these rows, in the order of the current stream; the others may choose every token."""
        if not masks and not self._masked:
            return
        for row in self._masked - masks.keys():
            self._words[row] = _OPEN
        for row, mask in masks.items():
            bits = self._words[row].view(np.uint8)
            size = min(len(mask), len(bits))
            bits[:size] = np.frombuffer(mask, dtype=np.uint8, count=size)
            bits[size:] = 0  # ids beyond a mask have no text
        self._masked = set(masks)
        self._mailbox.send(self._words.reshape(-1))
