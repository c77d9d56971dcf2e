"""Wrappers of the matrix kernels `linear`, `linear_residual`, `gate_up`: one launch each, over activations that a
kernel before it left in `Normed` or as bf16 rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels import tiling
from engine.kernels.build import Kernels
from engine.kernels.exchange import Channels, defines_of, values_of
from engine.kernels.launch import Argument, Launch, Shape, Trigger, prepare
from engine.kernels.tiling import Tiling
from engine.kernels.weights import Matrix

CHAIN = {"trigger": int(Trigger.AT_ENTRY)}  # `step.prepare_step` decides


@dataclass(frozen=True, slots=True)
class Normed:
    """A residual stream and what its norm needs; written whole by `linear_residual` and `advance`."""

    residual: torch.Tensor  # float32 [batch, hidden]
    scaled: torch.Tensor  # bfloat16 [batch, hidden]: residual · gain, not yet divided by the root mean square
    squares: torch.Tensor  # float32 [batch, hidden / 8]: sums of eight squares
    eps: float


def matrix_defines(matrix: Matrix, batch: int, how: Tiling) -> dict[str, int]:
    return {
        "OP_FORMAT": int(matrix.format),
        "OP_GROUP": matrix.group,
        "OP_COLUMNS": matrix.columns,
        "OP_BATCH": batch,
        **how.defines(),
    }


def matrix_launch(
    library: Kernels, name: str, defines: dict[str, int], values: dict[str, Argument], matrix: Matrix, how: Tiling
) -> Launch:
    shape = Shape((tiling.blocks(matrix, how), 1, 1), how.threads, tiling.shared_bytes(matrix, how))
    kernel = library.kernel(name, name, defines, shape.shared)
    return prepare(kernel, shape, {**values, **weight_values(matrix), **CHAIN})


def weight_values(matrix: Matrix) -> dict[str, Argument]:
    return {"weights": matrix.data, "scales": matrix.scales, "row_scale": matrix.row_scale}


def linear(
    library: Kernels, x: Normed, matrix: Matrix, bias: torch.Tensor | None, out: torch.Tensor, how: Tiling
) -> Launch:
    """out float32 [batch, rows] = rms_norm(x) · Wᵀ + bias; bias float32 [rows] or None."""
    defines = matrix_defines(matrix, out.shape[0], how)
    defines |= {"OP_ROWS": matrix.rows, "OP_SQUARES": x.squares.shape[1]}
    values: dict[str, Argument] = {"x": x.scaled, "squares": x.squares, "bias": bias, "out": out, "eps": x.eps}
    return matrix_launch(library, "linear", defines, values, matrix, how)


@dataclass(frozen=True, slots=True)
class ResidualUpdate:
    x: torch.Tensor  # bfloat16 [batch, columns]
    target: Normed
    gain: torch.Tensor  # float32 [hidden]
    bias: torch.Tensor | None = None  # float32 [hidden]


def linear_residual(
    library: Kernels, update: ResidualUpdate, matrix: Matrix, how: Tiling, channels: Channels | None = None
) -> Launch:
    """Adds x · Wᵀ + bias to target.residual, and prepares the next norm. `channels`: adds those of all ranks."""
    target, batch = update.target, update.x.shape[0]
    defines = matrix_defines(matrix, batch, how) | {"OP_ROWS": matrix.rows}
    defines |= defines_of(channels)
    values: dict[str, Argument] = {
        "x": update.x,
        "bias": update.bias,
        "gain": update.gain,
        "residual": target.residual,
        "normed": target.scaled,
        "squares": target.squares,
        **values_of(channels, tiling.blocks(matrix, how), batch * 8 * how.block_tiles),
    }
    return matrix_launch(library, "linear_residual", defines, values, matrix, how)


def gate_up(
    library: Kernels, x: Normed, matrix: Matrix, bias: torch.Tensor | None, out: torch.Tensor, how: Tiling
) -> Launch:
    """out bfloat16 [batch, rows / 2] = silu(gate) · up, gate the upper half of rms_norm(x) · Wᵀ + bias."""
    defines = matrix_defines(matrix, out.shape[0], how)
    defines |= {"OP_HALF": matrix.rows // 2, "OP_SQUARES": x.squares.shape[1]}
    values: dict[str, Argument] = {"x": x.scaled, "squares": x.squares, "bias": bias, "out": out, "eps": x.eps}
    return matrix_launch(library, "gate_up", defines, values, matrix, how)
