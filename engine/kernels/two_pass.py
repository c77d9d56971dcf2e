"""The head in two passes (`two_pass_head.cu`): it reads a coarse copy whole, and multiplies again only the rows that by
their bounds may be the one that the plain head finds, key for key.

For a row w, its copy s·q and an activation x (bfloat16, all), with f = 1 / root mean square, the same number in both:

    plain  = fl(fl(Σ w·x) · f)             coarse = fl(fl(fl(Σ q·x) · f) · s)
    |plain - coarse| ≤ (‖w - s·q‖ + γ·‖w‖ + γ·‖s·q‖) · ‖x‖ · f

The first term is exact arithmetic's (Cauchy-Schwarz). γ bounds what float32 adds to either sum, relative to Σ |w·x| ≤
‖w‖·‖x‖. A product of the tensor core adds 16 exact products to a sum: it aligns these 17 numbers to the largest, and
cuts them and the result. At 2^-23 of the largest each, doubled for hardware that keeps a bit less, that is at most 18 ·
2^-22 of the sum of magnitudes; a warp chains one for every 32 columns of its share (a lane's eight columns go to two
sums). Chains, halves and warps are then added in at most 16 float32 additions, whose 2^-24 each, with the three
roundings of f and s, stay below 2^-19. The kernel accounts for what numbers below the normal ones lose, and for sums
too large to be bounded. Neither pass rounds its result to fewer bits than float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.kernels import tiling
from engine.kernels.weights import Format, Matrix

LEAST_BYTES = 32 << 20  # a smaller head gains less than the second pass costs: 1 µs at this size, on an H100
_SPAN = 64  # columns of a unit of the copy
_VALUES = 1 << 20  # at a time, which bounds what is held in float32
_SURE = 1 + 2**-8  # covers the roundings of norms in float32, here and in the kernel's use of them
_LEAST = 1e-20  # what squares too small for float32 may hide of a norm


@dataclass(frozen=True, slots=True, eq=False)
class CoarseCopy:
    matrix: Matrix  # INT8_TILES, whole tiles of eight rows
    margins: torch.Tensor  # int32 [rows]: bf16 scale below, above it bf16 bound for an activation of length 1

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes + self.margins.nbytes

    def rows(self, first: int, last: int) -> CoarseCopy:
        """Returns the copy of these rows, which are whole tiles but for the last one's end."""
        tiles = -(-(last - first) // 8)
        data = self.matrix.data[first // 8 : first // 8 + tiles]
        return CoarseCopy(replace(self.matrix, rows=8 * tiles, data=data), self.margins[first:last])


def why_not(head: Matrix) -> str | None:
    if head.format is not Format.BF16:
        return f"the head is {head.format.name.lower()} already: a copy in eight bits would be no smaller"
    if head.columns % _SPAN:
        return f"{head.columns} columns are no multiple of {_SPAN}"
    if head.rows * head.columns * 2 < LEAST_BYTES:
        size = head.rows * head.columns * 2 / 2**20
        return f"the head has {size:.1f} MiB: below {LEAST_BYTES >> 20} a second pass costs more than the first saves"
    return None


def copy_bytes(head: Matrix) -> int:
    return -(-head.rows // 8) * 8 * head.columns + 4 * head.rows


def gamma(head: Matrix, warps: int) -> float:
    chained = max(tiling.most_units(head, warps), 2 * tiling.most_units(replace(head, format=Format.INT8_TILES), warps))
    return (chained + 1) * 18 * 2.0**-22 + 2.0**-19


def coarse_copy(head: Matrix, warps: int) -> CoarseCopy:
    """`warps` share a product. A row with a value that is no number has no bound: it is always multiplied again."""
    rows, columns, device = head.rows, head.columns, head.data.device
    data = torch.zeros(-(-rows // 8), columns // _SPAN, 32, 16, dtype=torch.int8, device=device)
    margins = torch.empty(rows, dtype=torch.int32, device=device)
    copy = CoarseCopy(Matrix(Format.INT8_TILES, -(-rows // 8) * 8, columns, data), margins)
    if device.type == "meta":
        return copy
    extra = gamma(head, warps)
    together = max(_VALUES // columns // 8, 1) * 8
    for first in range(0, rows, together):
        weight = head.data[first : first + together].float()
        sound = weight.isfinite().all(1)
        weight = weight.masked_fill(~sound.unsqueeze(1), 0.0)
        scale = _rounded_up(weight.abs().amax(1) / 127)
        q = (weight / scale.float().unsqueeze(1)).nan_to_num(nan=0.0).round_().clamp_(-127, 127)
        near = q * scale.float().unsqueeze(1)  # eight bits times eight: exact, as is the difference
        bound = _norm(weight - near) + extra * (_norm(weight) + _norm(near))
        bound = _rounded_up((bound * _SURE + _LEAST).masked_fill(~sound, torch.inf))
        margins[first : first + together] = _words(scale, bound)
        whole = torch.zeros(-(-q.shape[0] // 8) * 8, columns, dtype=torch.int8, device=device)
        whole[: q.shape[0]] = q.to(torch.int8)
        tiles = whole.view(-1, 8, columns // _SPAN, 4, 16).permute(0, 2, 1, 3, 4)
        data[first // 8 : first // 8 + tiles.shape[0]] = tiles.reshape(-1, columns // _SPAN, 32, 16)
    return copy


def coarse_rows(copy: CoarseCopy) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float64 q [rows, columns], scale and bound [rows]."""
    rows, columns = copy.margins.shape[0], copy.matrix.columns
    q = copy.matrix.data.view(-1, columns // _SPAN, 8, 4, 16).permute(0, 2, 1, 3, 4).reshape(-1, columns)[:rows]
    scale = (copy.margins << 16).view(torch.float32)
    bound = (copy.margins & -(1 << 16)).view(torch.float32)
    return q.double(), scale.double(), bound.double()


def _norm(rows: torch.Tensor) -> torch.Tensor:
    return rows.square().sum(1).sqrt_()


def _rounded_up(values: torch.Tensor) -> torch.Tensor:
    """Rounds non-negative float32 up to bfloat16; beyond its range to infinity."""
    bits = values.view(torch.int32)
    return ((bits + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


def _words(scale: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    low = scale.view(torch.int16).to(torch.int32) & 0xFFFF
    return low | bound.view(torch.int16).to(torch.int32) << 16
