"""Channels by which kernels add up their results over the GPUs of a split model (`exchange.cuh`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.launch import Argument


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
        """Returns the arguments of a launch of so many blocks, each of which sends `words` words at most."""
        if blocks > self.counts.shape[0] or words > self.room:
            raise ValueError(f"{blocks} blocks of {words} words have no channels")
        numbers = {"rank": self.rank, "half": self.half, "room": self.room}
        return {"inboxes": self.inboxes, "counts": self.counts, **numbers}

    def defines(self) -> dict[str, int]:
        return {"OP_RANKS": self.ranks}


NO_CHANNELS: dict[str, Argument] = {"inboxes": None, "counts": None, "rank": 0, "half": 0, "room": 0}


def inbox_words(ranks: int, blocks: int, room: int) -> int:
    return 2 * (ranks - 1) * blocks * room


@dataclass(frozen=True, slots=True)
class RankSums:
    """What the walks over the layers add up by: `few_rows` in float32, `many_tokens` in pairs of bfloat16."""

    few: Channels
    many: Channels
