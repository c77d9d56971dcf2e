"""Maps the memory that the GPUs of a split model write to each other."""

from __future__ import annotations

import torch

from engine.kernels import peers, tiling
from engine.kernels.exchange import Channels, RankSums, inbox_words
from engine.kernels.gpu import GpuShape, gpu_shape
from engine.kernels.peers import NoPeers
from engine.kernels.prefill import norm_words
from engine.model.layers.few_rows import MOST_ROWS
from engine.model.layers.parallel import RankExchange
from quant.checkpoint.config import ModelConfig


def sums_of_shapes(config: ModelConfig, gpu: GpuShape, ranks: int, tokens: int) -> RankSums:
    """Returns sums without memory, for kernels that are compiled ahead."""
    few, many = rooms(config, gpu, tokens)
    nowhere = torch.empty(ranks, dtype=torch.int64, device="meta")
    counts = torch.empty(max(few[0], many[0]), dtype=torch.int32, device="meta")
    return RankSums(
        Channels(ranks, 0, nowhere, counts[: few[0]], few[1]), Channels(ranks, 0, nowhere, counts[: many[0]], many[1])
    )


def rooms(config: ModelConfig, gpu: GpuShape, tokens: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns blocks, and words of a block, of products of few rows and of passes of up to `tokens` tokens."""
    tiles = tiling.tiles_of_block(config.hidden_size, gpu.multiprocessors)
    return (gpu.multiprocessors, MOST_ROWS * 8 * tiles), (tokens, norm_words(config.hidden_size))


def open_sums(config: ModelConfig, exchange: RankExchange, device: torch.device, tokens: int) -> RankSums:
    """All ranks call it together. Raises NoPeers on all of them where any cannot."""
    few, many = rooms(config, gpu_shape(device), tokens)
    part = exchange.part
    sizes = [inbox_words(part.ranks, blocks, room) for blocks, room in (few, many)]
    inboxes = _mapped(exchange, device, sum(sizes))
    found, first = [], 0
    for (blocks, room), size in zip((few, many), sizes, strict=True):
        addresses = torch.tensor([inbox + first * peers.WORD for inbox in inboxes], dtype=torch.int64, device=device)
        counts = torch.zeros(blocks, dtype=torch.int32, device=device)
        found.append(Channels(part.ranks, part.rank, addresses, counts, room))
        first += size
    return RankSums(*found)


def _mapped(exchange: RankExchange, device: torch.device, words: int) -> list[int]:
    """Allocates a rank's inbox, for as long as its process lives. Returns where each rank's lies for this one."""
    part = exchange.part
    torch.cuda.current_stream(device).synchronize()  # so that there is a context
    table = torch.zeros(part.ranks, 1 + peers.HANDLE, dtype=torch.int64)
    own, failure = 0, ""
    try:
        own = peers.allocate(words)
        table[part.rank] = torch.tensor([1, *peers.handle_of(own)])
    except NoPeers as error:
        failure = str(error)
    exchange.sum(table)
    opened: list[int] = []
    if bool(table[:, 0].all()):
        try:
            opened = [
                own if rank == part.rank else peers.open_handle(bytes(table[rank, 1:].tolist()))
                for rank in range(part.ranks)
            ]
        except NoPeers as error:
            failure = str(error)
    ready = exchange.sum(torch.tensor([len(opened) == part.ranks], dtype=torch.int64))
    if int(ready) < part.ranks:
        raise NoPeers(failure or "another GPU does not reach this one's memory")
    return opened
