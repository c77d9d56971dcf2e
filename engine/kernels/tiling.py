"""Division of a matrix product among blocks and warps. It depends on the matrix and the GPU, never on the batch, so
that sums keep their order whatever the number of rows.

Terms as in `gemv.cuh`: a unit is 64 bytes of a row, a tile eight rows, a segment the columns of a row that are copied
at once, a stage one segment of one tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.kernels.gpu import LARGEST_SHARED
from engine.kernels.weights import Format, Matrix

# Runs of eight columns in a lane's part of a unit.
_WORDS = {Format.BF16: 1, Format.INT8: 2, Format.INT4: 4, Format.INT8_TILES: 2}
WARPS = 8  # of a block; with weights of four bits, at least
_MOST_WARPS = 16  # with one that copies, 17: 96 registers a thread. With one fewer it would be 128.
_FIXED = 34 << 10  # bytes of shared memory that the kernels declare themselves, at most
_WHOLE_BYTES = 112 << 10  # a block's weights are kept whole in shared memory up to this size
_STREAM_BYTES = 106 << 10  # and stream through a ring of this size where they are larger
_WINDOW = 2  # stages under way of a block that is kept whole
_STREAM_WINDOW = 4  # and of one that streams more than four bits
UNDER_WAY = 34 << 10  # bytes under way of a block that streams four bits, or a head's copy
_COPY_GROUP = 128 << 10  # bytes of the tiles of a head's copy that are summed at once, at most
_PADDED = 1.02  # tiles of a block, rounded up for larger groups, by how many the smaller ones need, at most
# Tiles of a block, rounded up, by how many it needs: beyond this, idle multiprocessors cost more than groups of two.
_UNEVEN = 1.1
_STAGE_DEPTH = 4  # units a warp has of a stage, where weights stream
_MOST_TILES = 8  # summed at once
_FEW_TILES = (3, 4)  # of integers: unpacking needs the registers of more tiles; with fewer, too few loads are under way
_MOST_SUMS = 64  # tiles by warps, of each of the two groups whose sums are kept at a time
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
    """Shared memory of a stage: eight rows, padded where they are not packed, and their scales."""
    span = min(units(matrix), warps * depth)
    if matrix.format is Format.INT8_TILES:
        return span * 512
    if matrix.format is Format.INT4:
        return _ceil(span * (512 + matrix.format.span // matrix.group * 32), 128) * 128
    row = span * 64
    return _ceil(8 * (row + (64 if row % 128 == 0 else 0)), 128) * 128


def shared_bytes(matrix: Matrix, how: Tiling) -> int:
    return how.ring * stage_bytes(matrix, how.warps, how.depth)


def choose(
    matrix: Matrix,
    multiprocessors: int,
    *,
    pairs: bool = False,
    warps: int | None = None,
    shared: int = LARGEST_SHARED,
) -> Tiling:
    """One wave of blocks, equal shares. `pairs`: tiles come in twos (gate and up). `warps`: of a block, else chosen.
    `shared`: bytes that a block may ask for, which never change the order of a sum."""
    unit = 2 if pairs else 1
    block_tiles = tiles_of_block(matrix.rows, multiprocessors, unit)
    warps, depth = divide(matrix, warps, pairs=pairs)
    size, stages = stage_bytes(matrix, warps, depth), block_tiles * _ceil(units(matrix), warps * depth)
    room = shared - _FIXED
    whole = stages * size <= min(_WHOLE_BYTES, room) and stages <= MOST_STAGES
    ring = stages if whole else min(max(2, min(_STREAM_BYTES, room) // size), stages, MOST_STAGES)
    stream_window = _ceil(UNDER_WAY, size) if matrix.format is Format.INT4 else _STREAM_WINDOW
    window = _WINDOW if whole else stream_window
    tiles = _tiles_at_once(matrix, block_tiles, unit, warps)
    return Tiling(warps, depth, block_tiles, tiles, ring, window, whole)


def choose_copy(matrix: Matrix, multiprocessors: int, warps: int, shared: int = LARGEST_SHARED) -> Tiling:
    """Divides the coarse copy of a head, whose sums may have any order.

    The tiles that are summed at once have a bounded size: the larger it is, the later the last sums end; the smaller,
    the more often warps wait for each other. As many bytes are under way as of the plain head.
    """
    found = choose(matrix, multiprocessors, warps=warps, shared=shared)
    window = max(2, min(found.ring, UNDER_WAY // stage_bytes(matrix, warps, found.depth)))
    if found.whole:
        return replace(found, window=window)
    sizes = [size for size in (8, 4, 2) if size * 8 * matrix.columns <= _COPY_GROUP][:2] or [1]
    needed = _ceil(_ceil(matrix.rows, 8), multiprocessors)
    padded = [size * _ceil(needed, size) for size in sizes]
    tiles, block_tiles = next(both for both in zip(sizes, padded, strict=True) if both[1] <= _PADDED * min(padded))
    return replace(found, block_tiles=block_tiles, tiles=tiles, window=window)


def _tiles_at_once(matrix: Matrix, block_tiles: int, unit: int, warps: int) -> int:
    """Chooses how many tiles are summed at once: the most that give whole groups; of integers only a few, where a few
    do."""
    sizes = [
        n
        for n in range(unit, _MOST_TILES + 1, unit)
        if block_tiles % n == 0 and n * warps <= _MOST_SUMS * (2 if n == block_tiles else 1)
    ]
    few = [n for n in sizes if n in _FEW_TILES] if matrix.format in (Format.INT8, Format.INT4) else []
    return max(few or sizes)


def tiles_of_block(rows: int, multiprocessors: int, unit: int = 1) -> int:
    found = unit * _ceil(_ceil(rows, 8), multiprocessors * unit)
    even = 4 * _ceil(found, 4)
    if found <= _MOST_TILES or (unit == 2 and even >= _UNEVEN * found):
        return found
    return even


def divide(matrix: Matrix, warps: int | None = None, *, pairs: bool = False) -> tuple[int, int]:
    """Chooses the warps of a block, where they are not given, and how many units of a segment each of them has."""
    count, words = units(matrix), _WORDS[matrix.format]
    if matrix.format is Format.INT4 and warps is None:
        return _divide_four_bits(count, pairs)
    warps = warps or WARPS
    if count <= warps * _STAGE_DEPTH and _ceil(count, warps) * words <= 16:
        return warps, _ceil(count, warps)
    depths = range(min(_STAGE_DEPTH, 8 // words), 1, -1)  # with one unit each, stages would be too small
    even = next((depth for depth in depths if count % (warps * depth) == 0), None)
    return warps, even or min(depths, key=lambda depth: depth * _ceil(count, warps * depth))


def _divide_four_bits(count: int, pairs: bool) -> tuple[int, int]:
    """Chooses as few segments as the most warps need, then as few warps as these segments need. More warps hide the
    arithmetic that unpacks four bits; with two units at a time it has the registers that it needs."""
    if count <= _MOST_WARPS:
        return WARPS, _ceil(count, WARPS)
    longest = 2 * _MOST_WARPS  # segment, in units
    if pairs and count == longest:  # half as many warps have twice the registers
        return WARPS, count // WARPS
    # Activations of two segments stay in registers. Those of more are loaded again and again, and one warp fewer leaves
    # the registers that this takes.
    segments = _ceil(count, longest if count <= 2 * longest else longest - 2)
    return max(WARPS, _ceil(count, 2 * segments)), 2


def most_units(matrix: Matrix, warps: int) -> int:
    """Returns how many units of a row the warp with the largest share multiplies."""
    _, depth = divide(matrix, warps)
    whole, rest = divmod(units(matrix), warps * depth)
    return whole * depth + min(rest, depth)


def blocks(matrix: Matrix, how: Tiling) -> int:
    return _ceil(_ceil(matrix.rows, 8), how.block_tiles)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
