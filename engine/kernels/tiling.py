"""How a matrix product is spread over blocks and warps. Depends on the matrix and the card, never on the batch, so that
sums keep their order whatever the number of rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.kernels.weights import Format, Matrix

_CHUNKS = 24  # of a group, at most: what a warp keeps sums and requests for at once
_LONG_CHUNKS = 56  # where rows are so long that activations are read again for every group
_WHOLE_RING = 24  # chunks in flight where all of a block's weights are
_RING = 16  # and where they stream
_MANY_TILES = 16  # blocks of so many tiles are rounded up to whole groups of four
_MAX_TILES = 8


@dataclass(frozen=True, slots=True)
class Tiling:
    """A tile is eight output rows."""

    warps: int  # of a block; they split the columns
    block_tiles: int
    tiles: int  # summed at once
    ring: int  # chunks in flight a warp
    min_blocks: int = 1  # resident on a multiprocessor, what the compiler must leave registers for

    def threads(self) -> int:
        """Of a block."""
        return self.warps * 32

    def shared_bytes(self, matrix: Matrix) -> int:
        """What the ring takes of shared memory: a 16-byte word a lane and chunk, and four bytes a scale."""
        scales = matrix.format.span // matrix.group if matrix.format is Format.INT4 else 0
        return self.ring * self.threads() * (16 + 4 * scales)

    def defines(self) -> dict[str, int]:
        """As the sources name them."""
        return {
            "OP_WARPS": self.warps,
            "OP_BLOCK_TILES": self.block_tiles,
            "OP_TILES": self.tiles,
            "OP_RING": self.ring,
            "OP_MIN_BLOCKS": self.min_blocks,
        }


def depth(matrix: Matrix, warps: int) -> int:
    """Chunks a warp has of one tile."""
    return _ceil(matrix.columns // matrix.format.span, warps)


def choose(matrix: Matrix, multiprocessors: int, *, pairs: bool = False, warps: int = 8) -> Tiling:
    """One wave of blocks, equal shares. `pairs`: tiles come in twos (gate and up)."""
    unit = 2 if pairs else 1
    block_tiles = unit * _ceil(_ceil(matrix.rows, 8), multiprocessors * unit)
    if block_tiles >= _MANY_TILES:
        block_tiles = 4 * _ceil(block_tiles, 4)
    deep = depth(matrix, warps)
    most = _CHUNKS if deep <= 8 else _LONG_CHUNKS
    fits = [n for n in range(unit, _MAX_TILES + 1, unit) if block_tiles % n == 0 and n * deep <= most]
    return with_tiles(matrix, Tiling(warps, block_tiles, max(fits, default=unit), 1))


def with_tiles(matrix: Matrix, tiling: Tiling) -> Tiling:
    """With a ring of whole steps, a step being one chunk of every tile."""
    deep = depth(matrix, tiling.warps)
    most = _WHOLE_RING if tiling.tiles == tiling.block_tiles else _RING
    steps = [n for n in range(1, deep + 1) if n * tiling.tiles <= most] or [1]
    exact = max(n for n in steps if deep % n == 0)
    # One that divides the depth lets the compiler unroll; not at the price of half the requests in flight.
    return replace(tiling, ring=tiling.tiles * (exact if 2 * exact > steps[-1] else steps[-1]))


def blocks(matrix: Matrix, tiling: Tiling) -> int:
    """Blocks of the grid."""
    return _ceil(_ceil(matrix.rows, 8), tiling.block_tiles)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
