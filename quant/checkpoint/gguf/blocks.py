"""Converts llama.cpp's blocks of numbers to the weights of `forms`. R is the number of rows, K the numbers in a row.

Every product is computed in float32, as llama.cpp does, so that the weights are equal bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch

from quant.checkpoint.errors import BadTensor, NotFinite
from quant.checkpoint.forms import Int4Groups, Int4Minima, Int8Rows
from quant.checkpoint.gguf.kinds import KINDS
from quant.checkpoint.nibbles import pack_nibbles
from quant.checkpoint.rounding import round_rows
from quant.checkpoint.source import TensorSource, fetch, finite
from quant.checkpoint.spec import GgufSpec

GROUP: Final = 32  # inputs that share a scale in all blocks of four bits
_ROWS_AT_ONCE: Final = 512  # rows per step; bounds the size of the float32 copies
_KINDS: Final = {kind.name: kind for kind in KINDS.values()}


@dataclass(slots=True)
class _BlockCost:
    """Sums up the tensors of one block type. `error` is the sum of the squared rounding errors, `size` that of the
    squared numbers."""

    tensors: int = 0
    read: int = 0  # bytes in the file
    held: int = 0  # bytes in memory
    error: float = 0.0
    size: float = 0.0


@dataclass(slots=True)
class StorageCosts:
    """Sums up the memory and the rounding error of holding a file's tensors in other forms than the file's."""

    _by_kind: dict[tuple[str, str], _BlockCost] = field(default_factory=dict)

    def add(self, kind: str, form: str, read: int, held: int, lost: torch.Tensor | None = None) -> None:
        """Adds a tensor. `lost`: float [2], the sum of the squared rounding errors and that of the squared numbers."""
        cost = self._by_kind.setdefault((kind, form), _BlockCost())
        cost.tensors += 1
        cost.read += read
        cost.held += held
        if lost is not None:
            cost.error += float(lost[0])
            cost.size += float(lost[1])

    def __str__(self) -> str:
        """Returns the sums as one line for a log."""
        parts = []
        for (kind, form), cost in sorted(self._by_kind.items()):
            loss = f"{100 * (cost.error / cost.size) ** 0.5:.2f} % of their size lost" if cost.size else "nothing lost"
            parts.append(f"{cost.tensors} in {kind} as {form} ({cost.read >> 20} to {cost.held >> 20} MiB, {loss})")
        return "; ".join(parts)


def read_gguf(
    source: TensorSource,
    layer: str,
    spec: GgufSpec,
    in_features: int,
    out_features: int,
    costs: StorageCosts | None = None,
) -> Int4Groups | Int4Minima | Int8Rows:
    """Reads the weight of one linear. Raises BadTensor."""
    kind = _KINDS[spec.kinds[layer]]
    name = f"{layer}.{kind.name.lower()}"
    if in_features % kind.values:
        raise BadTensor(name, f"inputs in whole blocks of {kind.values}", f"{in_features} inputs")
    raw = fetch(source, name, (out_features, in_features // kind.values * kind.nbytes), (torch.uint8,))
    form = spec.form(layer)
    if form == "int8":
        weight, lost = _rounded(name, kind.name, raw, in_features)
        if costs is not None:
            costs.add(kind.name, "int8 rows", raw.nbytes, weight.nbytes, lost)
        return weight
    found = _four_bits(name, kind.name, raw, in_features)
    if costs is not None:
        costs.add(kind.name, "4 bits", raw.nbytes, found.nbytes)
    return found


def dequantize(kind: str, raw: torch.Tensor, columns: int) -> torch.Tensor:
    """Converts blocks, uint8 [R, bytes], to numbers, float32 [R, K]."""
    if kind in ("Q4_0", "Q4_1", "Q4_K"):
        q, scale, minimum = _nibbles(kind, raw)
        packed = pack_nibbles(q)
        if minimum is None:
            return Int4Groups(packed, scale, torch.full_like(scale, 8, dtype=torch.uint8), GROUP).dequantize(
                torch.float32
            )
        return Int4Minima(packed, scale, minimum, GROUP).dequantize(torch.float32)
    q, scale, size = _q8_0(raw) if kind == "Q8_0" else _q6_k(raw)
    return (q.float().view(len(raw), -1, size) * scale.unsqueeze(2)).view(len(raw), columns)


def widened(kind: str, raw: torch.Tensor, columns: int, dtype: torch.dtype, costs: StorageCosts) -> torch.Tensor:
    """Converts blocks to plain numbers [R, K], some rows at a time."""
    out = torch.empty(len(raw), columns, dtype=dtype, device=raw.device)
    lost = torch.zeros(2, dtype=torch.float64, device=raw.device)
    for first in range(0, len(raw), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        block = dequantize(kind, raw[rows], columns)
        out[rows] = block
        lost += _lost(block, out[rows].float())
    costs.add(kind, str(dtype).removeprefix("torch."), raw.nbytes, out.nbytes, lost)
    return out


def _rounded(name: str, kind: str, raw: torch.Tensor, columns: int) -> tuple[Int8Rows, torch.Tensor]:
    q = torch.empty(len(raw), columns, dtype=torch.int8, device=raw.device)
    scale = torch.empty(len(raw), dtype=torch.float32, device=raw.device)
    lost = torch.zeros(2, dtype=torch.float64, device=raw.device)
    for first in range(0, len(raw), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        block = dequantize(kind, raw[rows], columns)
        try:
            found = round_rows(block)
        except NotFinite as error:
            raise BadTensor(name, "finite numbers", "NaN or infinity") from error
        q[rows], scale[rows] = found.q, found.scale
        lost += _lost(block, found.dequantize(torch.float32))
    return Int8Rows(q, scale), lost


def _lost(block: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    sums = torch.stack(((block - kept).square().sum(), block.square().sum()))
    return sums.double()


def _four_bits(name: str, kind: str, raw: torch.Tensor, columns: int) -> Int4Groups | Int4Minima:
    """Repacks four-bit blocks in the layout of `forms`, without a change of any number."""
    groups = columns // GROUP
    packed = torch.empty(len(raw), columns // 2, dtype=torch.uint8, device=raw.device)
    dtype = torch.float32 if kind == "Q4_K" else torch.float16  # Q4_K: float16 times six bits; others: float16 as is
    scale, minimum = (torch.empty(len(raw), groups, dtype=dtype, device=raw.device) for _ in range(2))
    for first in range(0, len(raw), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        q, scales, minima = _nibbles(kind, raw[rows])
        packed[rows], scale[rows] = pack_nibbles(q), scales
        if minima is not None:
            minimum[rows] = minima
    finite(scale, name)
    if kind == "Q4_0":
        return Int4Groups(packed, scale, torch.full_like(scale, 8, dtype=torch.uint8), GROUP)
    return Int4Minima(packed, scale, finite(minimum, name), GROUP)


def _nibbles(kind: str, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Unpacks blocks to q, uint8 [R, K] in 0..15, and scales and minima [R, K/32]. A number is q · scale + minimum, or
    (q − 8) · scale if the blocks have no minima."""
    if kind == "Q4_K":
        return _q4_k(raw)
    blocks = _blocks(kind, raw)
    scale = _halves(blocks[..., :2])
    minimum = _halves(blocks[..., 2:4]) if kind == "Q4_1" else None
    q = blocks[..., -16:]
    return torch.cat((q & 15, q >> 4), dim=-1).flatten(1), scale, minimum


def _q4_k(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unpacks Q4_K. A block holds d and dmin, float16; 12 bytes of six-bit scales and minima of eight groups; 128 bytes
    of nibbles, of which each 32 hold one group in their low halves and the next in their high ones."""
    blocks = _blocks("Q4_K", raw)
    d, dmin = (_halves(blocks[..., at : at + 2]).float().unsqueeze(2) for at in (0, 2))
    first, second, both = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (both & 15) | ((first >> 2) & 48)), dim=-1)
    minima = torch.cat((second & 63, (both >> 4) | ((second >> 2) & 48)), dim=-1)
    q = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    q = torch.stack((q & 15, q >> 4), dim=3)
    return q.flatten(1), (d * scales.float()).flatten(1), -(dmin * minima.float()).flatten(1)


def _q6_k(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Unpacks Q6_K to q, int8 [R, K] in −32..31, and one scale per 16 numbers. A block holds 128 bytes of low nibbles,
    64 bytes of high bit pairs, 16 int8 scales and d, float16. Each half of a block, 64 and 32 bytes, holds 4 · 32
    numbers."""
    blocks = _blocks("Q6_K", raw)
    shape = (*blocks.shape[:2], 2)
    low = blocks[..., :128].reshape(*shape, 64)
    low = torch.cat((low & 15, low >> 4), dim=-1).view(*shape, 4, 32)
    high = blocks[..., 128:192].reshape(*shape, 1, 32)
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8, device=raw.device).view(4, 1)
    q = (low | (((high >> shifts) & 3) << 4)).to(torch.int8) - 32
    scale = _halves(blocks[..., 208:210]).float().unsqueeze(2) * blocks[..., 192:208].view(torch.int8).float()
    return q.flatten(1), scale.flatten(1), 16


def _q8_0(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Unpacks Q8_0 to q, int8 [R, K], and one scale per 32 numbers."""
    blocks = _blocks("Q8_0", raw)
    return blocks[..., 2:].view(torch.int8).flatten(1), _halves(blocks[..., :2]).float(), 32


def _blocks(kind: str, raw: torch.Tensor) -> torch.Tensor:
    """Views rows of bytes as uint8 [R, blocks, bytes of a block]."""
    return raw.reshape(len(raw), -1, _KINDS[kind].nbytes)


def _halves(pairs: torch.Tensor) -> torch.Tensor:
    """Reinterprets pairs of bytes, uint8 [..., 2], as float16 [...]."""
    return pairs.contiguous().view(torch.float16).squeeze(-1)
