"""Channels by which kernels add up their results over the GPUs of a split model (`exchange.cuh`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.build import Kernels
from engine.kernels.launch import Argument, Launch, Shape, prepare


@dataclass(frozen=True, slots=True)
class Channels:
    """Channels of blocks: block b has `room` words for each source and parity."""

    ranks: int
    rank: int
    inboxes: torch.Tensor  # int64 [ranks]: the address of each rank's inbox, as this one sees it
    counts: torch.Tensor  # int32 [blocks]
    room: int

    @property
    def half(self) -> int:
        """Returns the words of all channels from one source, in one of two turns."""
        return self.counts.shape[0] * self.room

    def values(self, blocks: int, words: int) -> dict[str, Argument]:
        """Returns the arguments of a launch of `blocks` blocks, each of which sends `words` words at most."""
        if blocks > self.counts.shape[0] or words > self.room:
            raise ValueError(f"{blocks} blocks of {words} words have no channels")
        numbers = {"rank": self.rank, "half": self.half, "room": self.room}
        return {"inboxes": self.inboxes, "counts": self.counts, **numbers}

    def defines(self) -> dict[str, int]:
        return {"OP_RANKS": self.ranks}


KEY_WORDS = 3  # that `Exchange.largest` sends of a key
_NO_CHANNELS: dict[str, Argument] = {"inboxes": None, "counts": None, "rank": 0, "half": 0, "room": 0}


def values_of(channels: Channels | None, blocks: int, words: int) -> dict[str, Argument]:
    """Returns the arguments of a launch that exchanges where there are other ranks."""
    return channels.values(blocks, words) if channels else _NO_CHANNELS


def defines_of(channels: Channels | None) -> dict[str, int]:
    return channels.defines() if channels else {}


def inbox_words(ranks: int, blocks: int, room: int) -> int:
    return 2 * (ranks - 1) * blocks * room


@dataclass(frozen=True, slots=True)
class RankSums:
    """Holds the channels through which walks add up: `few_rows` in float32, `many_tokens` in pairs of bfloat16."""

    few: Channels
    many: Channels


def exchange_sum(library: Kernels, x: torch.Tensor, channels: Channels) -> Launch:
    """x, bfloat16 of an even size or float32, contiguous, becomes its sum over all ranks."""
    pairs = x.dtype == torch.bfloat16
    words = x.numel() // 2 if pairs else x.numel()
    blocks = -(-words // channels.room)
    values: dict[str, Argument] = {"x": x, "words": words, **channels.values(blocks, channels.room), "trigger": 0}
    kernel = library.kernel("exchange_sum", "exchange_sum", channels.defines() | {"OP_PAIRS": int(pairs)})
    return prepare(kernel, Shape((blocks, 1, 1), 256), values).alone()


def sums_by_kernel(x: torch.Tensor, channels: Channels) -> bool:
    """Returns whether `exchange_sum` takes the tensor."""
    words = x.numel() // 2 if x.dtype == torch.bfloat16 else x.numel()
    even = x.dtype == torch.float32 or (x.dtype == torch.bfloat16 and x.numel() % 2 == 0)
    return x.is_cuda and even and x.is_contiguous() and words <= channels.room * channels.counts.shape[0]
