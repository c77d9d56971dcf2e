"""Holds keys and values of every running sequence, in pages of 16 tokens.

Logically [layers, 2, pages, kv_heads, 16, head_dim]. On a CPU heads lie outside pages, so that a run of neighbouring
pages is one matrix a head; on a GPU pages lie outside heads, as kernels and page transfers want them.

As fp8 they are e4m3 without a scale: rounded to nearest, and to ±448 beyond. torch sees bytes, since few of its
operations know that type.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.linear import Placement
from engine.settings import PAGE_SIZE, KvDtype

_E4M3, _MOST = torch.float8_e4m3fn, 448.0


def stored_as(choice: KvDtype, computed: torch.dtype) -> torch.dtype:
    return _E4M3 if choice == "fp8" else computed


def _widened(held: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts bytes of e4m3 to numbers, exactly; NaN may become 480."""
    if held.device.type != "cpu":
        return held.view(_E4M3).to(dtype)
    # torch's own takes ten times as long there. As float16 an exponent is 8 too low, that of a denormal too.
    bits = held.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return bits.view(torch.float16).to(dtype).mul_(256.0)


@dataclass(frozen=True, slots=True)
class KvShape:
    layers: int
    kv_heads: int
    head_dim: int

    def page_bytes(self, dtype: torch.dtype) -> int:
        return 2 * self.layers * self.kv_heads * PAGE_SIZE * self.head_dim * dtype.itemsize


class KvCache:
    """The scheduler decides which sequence owns which page."""

    def __init__(
        self,
        shape: KvShape,
        pages: int,
        placement: Placement,
        heads_outside: bool,
        stored: torch.dtype | None = None,
    ) -> None:
        """`placement`: of arithmetic, and of storage unless `stored` differs."""
        self.shape = shape
        self.pages = pages
        self.heads_outside = heads_outside
        self.stored = stored or placement.dtype
        self._computed = placement.dtype
        self._narrow = self.stored == _E4M3
        placement = Placement(torch.uint8 if self._narrow else self.stored, placement.device)
        heads, dim = shape.kv_heads, shape.head_dim
        if heads_outside:
            # Read only where written, hence not cleared.
            size = (shape.layers, 2, heads, pages, PAGE_SIZE, dim)
            self._storage = torch.empty(size, dtype=placement.dtype, device=placement.device)
            paged = self._storage.transpose(2, 3)
        else:
            size = (shape.layers, 2, pages, heads, PAGE_SIZE, dim)
            self._storage = torch.zeros(size, dtype=placement.dtype, device=placement.device)
            paged = self._storage
        self._paged = tuple(paged.unbind(0))
        self._by_token = tuple(layer.permute(1, 3, 0, 2, 4) for layer in self._paged)  # [pages, 16, 2, heads, dim]
        # With heads outside alone: [2 · heads, slots, dim], and keys and values [1, heads, slots, dim].
        flat = self._storage.view(shape.layers, 2, heads, -1, dim) if heads_outside else self._storage[:0]
        self._flat = tuple(layer.flatten(0, 1) for layer in flat.unbind(0))
        self._keys = tuple(layer[:1] for layer in flat.unbind(0))
        self._values = tuple(layer[1:] for layer in flat.unbind(0))

    def layer(self, index: int) -> torch.Tensor:
        """[2, pages, kv_heads, 16, head_dim]: keys, then values, in place."""
        return self._paged[index]

    def write(self, index: int, slots: torch.Tensor, fresh: torch.Tensor) -> None:
        """Puts fresh [tokens, 2 · kv_heads, head_dim] at slots [tokens]; slot = page · 16 + offset."""
        if self._narrow:
            fresh = fresh.clamp(-_MOST, _MOST).to(_E4M3).view(torch.uint8)
        if self.heads_outside:
            self._flat[index].index_copy_(1, slots, fresh.transpose(0, 1))
            return
        values = fresh.view(-1, 2, self.shape.kv_heads, self.shape.head_dim)
        self._by_token[index].index_put_((slots // PAGE_SIZE, slots % PAGE_SIZE), values)

    def run(self, index: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [1, kv_heads, count, head_dim] of neighbouring slots: views, where they lie as arithmetic
        wants them. Only with heads outside."""
        keys, values = self._keys[index].narrow(2, first, count), self._values[index].narrow(2, first, count)
        return self._read(keys), self._read(values)

    def gather(self, index: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [1, kv_heads, pages · 16, head_dim] of any pages: copies."""
        if self.heads_outside:
            # In the order of the memory: index_select would copy all of a transposed pool first.
            found = self._storage[index].index_select(2, pages)
        else:
            found = self._storage[index].index_select(1, pages).transpose(1, 2)
        keys, values = self._read(found).flatten(2, 3).unsqueeze(1).unbind(0)
        return keys, values

    def _read(self, held: torch.Tensor) -> torch.Tensor:
        return _widened(held, self._computed) if self._narrow else held

    def read_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """Copies: [pages, layers, 2, kv_heads, 16, head_dim], as they lie."""
        if self.heads_outside:
            return self._storage.index_select(3, pages).permute(3, 0, 1, 2, 4, 5)
        return self._storage.index_select(2, pages).permute(2, 0, 1, 3, 4, 5)

    def write_pages(self, pages: torch.Tensor, content: torch.Tensor) -> None:
        """The inverse of `read_pages`."""
        if self.heads_outside:
            self._storage.index_copy_(3, pages, content.permute(1, 2, 3, 0, 4, 5))
        else:
            self._storage.index_copy_(2, pages, content.permute(1, 2, 0, 3, 4, 5))

    @property
    def storage(self) -> torch.Tensor:
        """The whole pool: [layers, 2, kv_heads, pages, 16, head_dim] with heads outside, else pages before heads."""
        return self._storage

    @property
    def placement(self) -> Placement:
        return Placement(self._storage.dtype, self._storage.device)

    @property
    def nbytes(self) -> int:
        return self._storage.nbytes
