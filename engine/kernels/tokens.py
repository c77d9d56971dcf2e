"""Wrappers of `head`, `two_pass_head`, `advance`, `start`, `take`: from the last residual to the next step."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from engine.kernels import tiling
from engine.kernels.attention import RowPages
from engine.kernels.build import Kernels
from engine.kernels.exchange import KEY_WORDS, Channels, defines_of, values_of
from engine.kernels.launch import Argument, Launch, Shape, Trigger, prepare
from engine.kernels.linear import CHAIN, Normed, matrix_defines, matrix_launch
from engine.kernels.tiling import Tiling
from engine.kernels.two_pass import CoarseCopy
from engine.kernels.weights import Matrix

MAX_STOPS = 8
STOPPED, FULL, NO_TOKEN = 1, 2, 4  # flags of a ring entry
_THREADS = 256


@dataclass(frozen=True, slots=True)
class Choice:
    temperature: torch.Tensor  # float32 [batch]; 0 is greedy
    noise_key: torch.Tensor  # int64 [batch]: `engine.sampling.noise.seed_key`
    best: torch.Tensor  # int64 [batch], zero between steps
    logits: torch.Tensor | None = None  # float32 [batch, vocabulary]; None: they are not kept
    assured: torch.Tensor | None = None  # int32 [batch], as `best`: a score that some token reaches; two passes need it
    masks: torch.Tensor | None = None  # int32 [batch, words]: a bit for each token that may be chosen; None: all may


@dataclass(frozen=True, slots=True)
class Progress:
    token: torch.Tensor  # int32 [batch]: being fed
    last_position: torch.Tensor  # int32 [batch]: a token placed there is the row's last
    stops: torch.Tensor  # int32 [batch, 8]: tokens that end the row, -1 for none
    count: torch.Tensor  # int32 [batch]: tokens reported
    ring: torch.Tensor  # int64 [batch, entries], pinned: count << 32 | flags << 24 | token


def head(library: Kernels, x: Normed, matrix: Matrix, choice: Choice, places: RowPages, how: Tiling) -> Launch:
    """choice.best = the best token of each row, as a key whose lower half is the id's complement."""
    defines = matrix_defines(matrix, x.residual.shape[0], how)
    defines |= {"OP_ROWS": matrix.rows, "OP_SQUARES": x.squares.shape[1]}
    values: dict[str, Argument] = {
        "x": x.scaled,
        "squares": x.squares,
        "temperature": choice.temperature,
        "noise_key": choice.noise_key,
        "position": places.position,
        "masks": choice.masks,
        "logits": choice.logits,
        "best": choice.best,
        "eps": x.eps,
    }
    return matrix_launch(library, "head", defines, values, matrix, how)


@dataclass(frozen=True, slots=True)
class TwoPasses:
    """Both divisions have the same number of warps."""

    plain: Matrix
    plain_tiling: Tiling  # as `head` has it: it is part of the order of its sums
    coarse: CoarseCopy
    coarse_tiling: Tiling
    first_token: int  # of these rows
    vocabulary: int  # tokens of all ranks

    @property
    def ring_bytes(self) -> int:
        """Shared memory that both passes use in turn."""
        return max(
            tiling.shared_bytes(self.coarse.matrix, self.coarse_tiling),
            self.plain_ring * tiling.stage_bytes(self.plain, self.plain_tiling.warps, self.plain_tiling.depth),
        )

    def shared_bytes(self, batch: int) -> int:
        """Dynamic shared memory: the ring, and an upper bound of each row."""
        return self.ring_bytes + batch * self.coarse_tiling.block_tiles * 8 * 4

    @property
    def blocks(self) -> int:
        """No more than the GPU has multiprocessors."""
        return tiling.blocks(self.coarse.matrix, self.coarse_tiling)

    @property
    def plain_ring(self) -> int:
        """Stages that fit where the first pass had its own, but at least a tile."""
        size = tiling.stage_bytes(self.plain, self.plain_tiling.warps, self.plain_tiling.depth)
        fits = tiling.shared_bytes(self.coarse.matrix, self.coarse_tiling) // size
        return min(max(fits, 2), tiling.MOST_STAGES)


def two_pass_head(library: Kernels, x: Normed, both: TwoPasses, choice: Choice, places: RowPages) -> Launch:
    """Chooses as `head`, but without logits."""
    values: dict[str, Argument] = {
        "temperature": choice.temperature,
        "noise_key": choice.noise_key,
        "position": places.position,
        "masks": choice.masks,
        "assured": choice.assured,
        "best": choice.best,
        "first_token": both.first_token,
    }
    return two_pass_launch(library, "two_pass_head", x, both, values, OP_TOKENS=both.vocabulary)


def two_pass_launch(
    library: Kernels, name: str, x: Normed, both: TwoPasses, values: dict[str, Argument], **more: int
) -> Launch:
    first, second, batch = both.coarse_tiling, both.plain_tiling, x.residual.shape[0]
    if first.warps != second.warps:
        raise ValueError(f"passes of {first.warps} and {second.warps} warps")
    defines = matrix_defines(both.coarse.matrix, batch, first) | more
    defines |= {"OP_ROWS": both.plain.rows, "OP_SQUARES": x.squares.shape[1], "OP_RING_BYTES": both.ring_bytes}
    defines |= {"OP_PLAIN_DEPTH": second.depth, "OP_PLAIN_TILES": second.tiles, "OP_PLAIN_RING": both.plain_ring}
    matrices: dict[str, Argument] = {
        "x": x.scaled,
        "squares": x.squares,
        "weights": both.plain.data,
        "coarse": both.coarse.matrix.data,
        "margins": both.coarse.margins,
        "eps": x.eps,
    }
    shape = Shape((both.blocks, 1, 1), first.threads, both.shared_bytes(batch))
    return prepare(library.kernel(name, name, defines, shape.shared), shape, {**matrices, **values, **CHAIN})


@dataclass(frozen=True, slots=True)
class FirstNorm:
    table: torch.Tensor  # bfloat16 [vocabulary, hidden]
    gain: torch.Tensor  # float32 [hidden]
    target: Normed
    scale: float = 1.0  # of the table's values

    @property
    def defines(self) -> dict[str, int]:
        return {"OP_COLUMNS": self.table.shape[1], **scale_defines(self.scale)}


def scale_defines(scale: float) -> dict[str, int]:
    """Returns what kernels that read the table of embeddings are compiled with."""
    return {} if scale == 1.0 else {"OP_EMBEDDING_SCALE": int.from_bytes(struct.pack("<f", scale), "little")}


def advance(
    library: Kernels,
    choice: Choice,
    progress: Progress,
    places: RowPages,
    first: FirstNorm,
    channels: Channels | None = None,
) -> Launch:
    """Moves the chosen tokens into the state, reports and embeds them. `channels`: the best of all ranks is chosen."""
    rows = progress.token.shape[0]
    values: dict[str, Argument] = {
        "best": choice.best,
        "assured": choice.assured,
        "token": progress.token,
        "position": places.position,
        "last_position": progress.last_position,
        "stops": progress.stops,
        "count": progress.count,
        "ring": progress.ring,
        "ring_size": progress.ring.shape[1],
        **embedding(first),
        **values_of(channels, rows, KEY_WORDS),
        "trigger": int(Trigger.AT_ENTRY),
    }
    kernel = library.kernel("advance", "advance", first.defines | defines_of(channels))
    return prepare(kernel, Shape((rows, 1, 1), _THREADS), values)


def start(library: Kernels, progress: Progress, places: RowPages, first: FirstNorm) -> Launch:
    values = {"token": progress.token, "position": places.position, **embedding(first)}
    kernel = library.kernel("advance", "start", first.defines)
    return prepare(kernel, Shape((progress.token.shape[0], 1, 1), _THREADS), values).alone()


@dataclass(frozen=True, slots=True)
class Fed:
    residual: torch.Tensor  # float32 [tokens, hidden]
    place: torch.Tensor  # int32; its first is how many count


def take(library: Kernels, fed: Fed, gain: torch.Tensor, target: Normed) -> Launch:
    """target = the last token that counts, as one row for the head."""
    values: dict[str, Argument] = {"chunk": fed.residual, "place": fed.place, "gain": gain, **_stream(target)}
    kernel = library.kernel("advance", "take", {"OP_COLUMNS": fed.residual.shape[1]})
    return prepare(kernel, Shape((1, 1, 1), _THREADS), values).alone()


def embedding(first: FirstNorm) -> dict[str, torch.Tensor]:
    return {"table": first.table, "gain": first.gain, **_stream(first.target)}


def _stream(target: Normed) -> dict[str, torch.Tensor]:
    return {"residual": target.residual, "normed": target.scaled, "squares": target.squares}
