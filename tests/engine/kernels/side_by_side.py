"""Streams of one GPU stand for the ranks of a split model; `tests/engine/worker/test_gpu_ranks.py` has two GPUs."""

from __future__ import annotations

import torch

from engine.kernels.exchange import Channels, inbox_words
from engine.kernels.launch import Launch, Launcher


def channels(ranks: int, blocks: int, room: int) -> list[Channels]:
    inboxes = [
        torch.full((inbox_words(ranks, blocks, room),), -1, dtype=torch.int32, device="cuda") for _ in range(ranks)
    ]
    addresses = torch.tensor([one.data_ptr() for one in inboxes], device="cuda")
    HELD.extend(inboxes)
    return [
        Channels(ranks, rank, addresses, torch.zeros(blocks, dtype=torch.int32, device="cuda"), room)
        for rank in range(ranks)
    ]


HELD: list[torch.Tensor] = []  # memory that only addresses point to


def side_by_side(launcher: Launcher, launches: list[list[Launch]], streams: list[torch.cuda.Stream]) -> None:
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for own, stream in zip(launches, streams, strict=True):
        with torch.cuda.stream(stream):
            launcher.enqueue([one.alone() for one in own])
    torch.cuda.synchronize()
