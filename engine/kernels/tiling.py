"""Division of a matrix product among blocks and warps. It depends on the matrix and the GPU, never on the batch, so
that sums keep their order whatever the number of rows.

Terms as in `gemv.cuh`: a unit is 64 bytes of a row, a tile eight rows, a segment the columns of a row that are copied
at once, a stage one segment of one tile.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.kernels.gpu import LARGEST_SHARED
from engine.kernels.weights import Format, Matrix

# Runs of eight columns in a lane's part of a unit.
_WORDS = {Format.BF16: 1, Format.INT8: 2, Format.INT4: 4, Format.INT8_TILES: 2}
WARPS = 8  # of a block, where the columns allow it
_FIXED = 34 << 10  # bytes of shared memory that the kernels declare themselves, at most
_WHOLE_BYTES = 112 << 10  # a block's weights are kept whole in shared memory up to this size
_STREAM_BYTES = 106 << 10  # and stream through a ring of this size where they are larger
_WINDOW = 2  # stages under way of a block that is kept whole
_STREAM_WINDOW = 4  # and of one that streams
_UNEVEN = (
    1.1  # tiles of a block, rounded up, by how many it needs: beyond, idle multiprocessors cost more than groups of two
)
_STAGE_DEPTH = 4  # units a warp has of a stage, where weights stream
_MOST_TILES = 8
MOST_STAGES = 31


@dataclass(frozen=True, slots=True)
class Tiling:
    warps: int  # consumers of a block; they split the columns of a segment
    depth: int  # units of a segment a warp has
    block_tiles: int
    tiles: int  # summed at once
    ring: int  # stages
    window: int  # stages under way at a time
    whole: bool = False  # every stage has a place of its own
    min_blocks: int = 1  # resident on a multiprocessor, what the compiler must leave registers for

    @property
    def threads(self) -> int:
        """Threads of a block; one further warp copies."""
        return self.warps * 32 + 32

    def defines(self) -> dict[str, int]:
        return {
            "OP_WARPS": self.warps,
            "OP_DEPTH": self.depth,
            "OP_BLOCK_TILES": self.block_tiles,
            "OP_TILES": self.tiles,
            "OP_RING": self.ring,
            "OP_WINDOW": self.window,
            "OP_MIN_BLOCKS": self.min_blocks,
        }


def units(matrix: Matrix) -> int:
    return matrix.columns // matrix.format.span


def stage_bytes(matrix: Matrix, warps: int, depth: int) -> int:
    """Shared memory of a stage: eight rows, padded, and their scales."""
    span = min(units(matrix), warps * depth)
    if matrix.format is Format.INT8_TILES:
        return span * 512
    row = span * 64
    scales = matrix.format.span // matrix.group * 32 * span if matrix.format is Format.INT4 else 0
    return _ceil(8 * (row + (64 if row % 128 == 0 else 0)) + scales, 128) * 128


def shared_bytes(matrix: Matrix, how: Tiling) -> int:
    return how.ring * stage_bytes(matrix, how.warps, how.depth)


def choose(
    matrix: Matrix, multiprocessors: int, *, pairs: bool = False, warps: int = WARPS, shared: int = LARGEST_SHARED
) -> Tiling:
    """One wave of blocks, equal shares. `pairs`: tiles come in twos (gate and up). `shared`: bytes that a block may ask
    for, which never change the order of a sum."""
    unit = 2 if pairs else 1
    block_tiles = tiles_of_block(matrix.rows, multiprocessors, unit)
    tiles = max(n for n in range(unit, _MOST_TILES + 1, unit) if block_tiles % n == 0)
    warps, depth = divide(matrix, warps)
    size, stages = stage_bytes(matrix, warps, depth), block_tiles * _ceil(units(matrix), warps * depth)
    room = shared - _FIXED
    whole = stages * size <= min(_WHOLE_BYTES, room) and stages <= MOST_STAGES
    ring = stages if whole else min(max(2, min(_STREAM_BYTES, room) // size), stages, MOST_STAGES)
    return Tiling(warps, depth, block_tiles, tiles, ring, _WINDOW if whole else _STREAM_WINDOW, whole)


def tiles_of_block(rows: int, multiprocessors: int, unit: int = 1) -> int:
    found = unit * _ceil(_ceil(rows, 8), multiprocessors * unit)
    even = 4 * _ceil(found, 4)
    if found <= _MOST_TILES or (unit == 2 and even >= _UNEVEN * found):
        return found
    return even


def divide(matrix: Matrix, warps: int) -> tuple[int, int]:
    """Warps and the depth of a segment, so that segments are equal and stages not too large."""
    count, words = units(matrix), _WORDS[matrix.format]
    if count <= warps * _STAGE_DEPTH and _ceil(count, warps) * words <= 16:
        return warps, _ceil(count, warps)
    for fewer in (warps, warps // 2, warps // 4, 1):
        for depth in range(min(_STAGE_DEPTH, 8 // words), 0, -1):
            if fewer and count % (fewer * depth) == 0:
                return fewer, depth
    raise AssertionError("a single warp takes any number of units")


def blocks(matrix: Matrix, how: Tiling) -> int:
    return _ceil(_ceil(matrix.rows, 8), how.block_tiles)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
