"""Products of few tokens with plain weights on a GPU, the library's and ours: µs of one in a chain of products with
weights of their own, so that none comes out of the L2, each with what follows it in a layer.

    python -m bench.products --model qwen3-0.6b --tokens 16 64 128 256

Ours are checked against float64. With --divisions, all that the GPU holds at a time, not the one that is chosen alone.
Prints a table and ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product

import torch
from torch.nn import functional

from bench.about import device, revision
from bench.kernels import SPECS, median_of_replays
from engine.kernels import plain_product as few
from engine.kernels import prefill as ops
from engine.kernels.build import KernelLibrary, open_library
from engine.kernels.gpu import GpuShape
from engine.kernels.launch import Launch, Launcher

_CHAIN_BYTES = 400e6  # of weights, at least
_ROUNDED, _NEAR_ZERO = 2**-7, 0.02  # of a number, results in bf16; where the sum's own rounding counts


@dataclass(frozen=True, slots=True)
class Case:
    """One product of a layer."""

    name: str
    rows: int
    columns: int
    gated: bool = False
    normed: bool = False  # residual and norm follow


def cases(model: str) -> list[Case]:
    """Of a model's layer."""
    spec = SPECS[model]
    return [
        Case("queries, keys, values", spec.heads.rows, spec.hidden),
        Case("gate and up", 2 * spec.inner, spec.hidden, gated=True),
        Case("output", spec.hidden, spec.heads.queries * spec.heads.dim, normed=True),
        Case("down", spec.hidden, spec.inner, normed=True),
    ]


def divisions(case: Case, tokens: int, gpu: GpuShape) -> Iterator[few.Division]:
    """All that the GPU may hold at a time and that leave few multiprocessors idle."""
    slices = (1,) if case.gated else range(1, few.MOST_SLICES + 1)
    for one in product(few.TILES, few.PEERS, slices):
        how = few.division(tokens, case.columns, gpu, *one)
        if gpu.multiprocessors // 3 <= how.blocks(tokens, case.rows) <= gpu.multiprocessors:
            yield how


class Chain:
    """A case for so many tokens, with random numbers."""

    def __init__(self, case: Case, tokens: int, library: KernelLibrary, launcher: Launcher) -> None:
        self._case, self._tokens, self._library, self._launcher = case, tokens, library, launcher
        count = int(-(-_CHAIN_BYTES // (2 * case.rows * case.columns)))
        scale = case.columns**-0.5
        self._weights = [self._random(case.rows, case.columns, scale).bfloat16() for _ in range(count)]
        self._x = self._random(tokens, case.columns).bfloat16()
        self._width = case.rows // 2 if case.gated else case.rows
        self._gain = torch.ones(case.rows, device="cuda")
        normed = torch.empty(tokens, case.rows, device="cuda", dtype=torch.bfloat16)
        self._stream = ops.Stream(self._random(tokens, case.rows), normed, 1e-6)

    def library_us(self) -> float:
        """By the library."""
        out = torch.empty(self._tokens, self._case.rows, device="cuda", dtype=torch.bfloat16)
        inner = torch.empty(self._tokens, self._width, device="cuda", dtype=torch.bfloat16)

        def enqueue() -> None:
            for weight in self._weights:
                torch.mm(self._x, weight.t(), out=out)
                if self._case.gated:
                    self._launcher.enqueue([ops.gate(self._library, ops.Parts(out), inner)])
                self._launcher.enqueue(self._after(ops.Parts(out)))

        return median_of_replays(enqueue, len(self._weights))

    def own_us(self, how: few.Division) -> float:
        """By ours. Raises ValueError where it is wrong."""
        kind = torch.bfloat16 if how.slices == 1 else torch.float32
        out = torch.full((how.slices, self._tokens, self._width), float("nan"), device="cuda", dtype=kind)
        launches: list[Launch] = []
        for weight in self._weights:
            launches.append(few.plain_product(self._library, self._x, weight, out, how, gated=self._case.gated))
            launches += self._after(ops.Parts(out if how.slices > 1 else out[0]))
        self._launcher.enqueue([launches[0].alone()])
        expected = self._expected()
        error = (out.double().sum(0) - expected).abs() / (expected.abs() + _NEAR_ZERO)
        if not float(error.nan_to_num(nan=float("inf")).max()) < _ROUNDED:
            raise ValueError(f"{self._case.name} of {self._tokens} tokens, {how}: wrong")
        return median_of_replays(lambda: self._launcher.enqueue(launches), len(self._weights))

    def _after(self, parts: ops.Parts) -> list[Launch]:
        return [ops.add_norm(self._library, parts, self._gain, self._stream)] if self._case.normed else []

    def _expected(self) -> torch.Tensor:
        found = self._x.double() @ self._weights[0].double().T
        if not self._case.gated:
            return found
        gate, up = found[:, : self._width], found[:, self._width :]
        return functional.silu(gate) * up

    @staticmethod
    def _random(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, device="cuda") * scale


def measure(case: Case, tokens: int, library: KernelLibrary, launcher: Launcher, every: bool) -> dict[str, object]:
    """One record."""
    chosen = few.divide(tokens, case.rows, case.columns, library.gpu, gated=case.gated)
    tried = list(divisions(case, tokens, library.gpu)) if every else [] if chosen is None else [chosen]
    chain = Chain(case, tokens, library, launcher)
    theirs = chain.library_us()
    own = sorted(((chain.own_us(how), how) for how in tried), key=lambda one: one[0])
    print(f"{case.name:22} {tokens:4} tokens: the library's {theirs:6.2f} µs", flush=True)
    for took, how in own:
        print(f"{took:46.2f} µs {how}{' chosen' if how == chosen else ''}", flush=True)
    return {
        "case": case.name,
        "rows": case.rows,
        "columns": case.columns,
        "tokens": tokens,
        "library_us": round(theirs, 2),
        "own": [{"us": round(took, 2), **asdict(how), "chosen": how == chosen} for took, how in own],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=SPECS, default="qwen3-0.6b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 32, 64, 96, 128, 160, 192, 256, 384])
    parser.add_argument("--divisions", action="store_true", help="all of them")
    given = parser.parse_args(argv)
    torch.manual_seed(0)
    library, launcher = open_library(torch.cuda.get_device_capability()), Launcher()
    records = [
        measure(case, tokens, library, launcher, given.divisions)
        for case in cases(given.model)
        for tokens in given.tokens
    ]
    print(json.dumps({"device": device(), "revision": revision(), "model": given.model, "products": records}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
