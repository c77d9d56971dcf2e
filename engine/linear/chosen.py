"""Multiplies many tokens by plain weights on a GPU, each product by the fastest algorithm of cuBLASLt.

The library's own choice stays unless another is clearly faster. Choices are kept beside the compiled kernels, so that a
server that is started again rounds as it did before.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from engine.kernels.capture import device_seconds
from engine.kernels.keeping import keep
from engine.linear import DenseLinear
from engine.linear.cublas import Cublas, CublasError, CublasProduct, PreparedProduct

# Of products that are chosen, where they are the library's; others are rare, or go best by the library's own choice.
TOKENS = (256, 384, 512, 1024, 2048, 4096)
LEAST_WEIGHTS = 8 << 20  # of a matrix; smaller products gain nothing that shows
_NEIGHBOURS = (96, 128, 192, 256, 320, 384, 512, 768, 1024, 2048, 4096)  # tokens whose algorithms are tried as well
_ALGORITHMS = 8  # the library names, of each
_LEAST_GAIN = 0.015
_LAYERS, _FEW_LAYERS = 8, 3  # whose weights are gone through, so that they do not come out of the L2
_FINALISTS, _ROUNDS = 4, 3
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Chosen:
    prepared: PreparedProduct
    algorithm: bytes


class ChosenProducts:
    """Chooses by shape. Without the library or without a GPU: torch's product."""

    def __init__(self, linears: Iterable[DenseLinear] = (), folder: Path | None = None) -> None:
        self._weights: dict[tuple[int, int], list[torch.Tensor]] = {}
        for linear in linears:
            rows, columns = linear.weight.shape
            held = self._weights.setdefault((rows, columns), [])
            if linear.weight.is_cuda and rows * columns >= LEAST_WEIGHTS and len(held) < _LAYERS:
                held.append(linear.weight)
        self._known: dict[CublasProduct, _Chosen | None] = {}
        self._cublas = _library(next((held[0].device for held in self._weights.values() if held), None))
        self._kept: Path | None = None
        if folder is not None and self._cublas is not None:
            self._kept = folder / self._cublas.name

    def multiply(self, weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        """Computes out = x · weightᵀ. The first of a shape is timed in graphs of its own, so not within a capture, and
        on a GPU on a stream that can capture."""
        product = CublasProduct(x.shape[0], *weight.shape)
        if product not in self._known:
            self._known[product] = self._choose(product, x, out)
        chosen = self._known[product]
        if chosen is None or self._cublas is None:
            torch.mm(x, weight.t(), out=out)
        else:
            self._cublas.multiply(chosen.prepared, chosen.algorithm, weight, x, out)

    def _choose(self, product: CublasProduct, x: torch.Tensor, out: torch.Tensor) -> _Chosen | None:
        """None stands for torch's product."""
        weights = self._weights.get((product.rows, product.columns))
        if self._cublas is None or not weights or product.tokens not in TOKENS:
            return None
        try:
            prepared, name = self._cublas.prepare(product, _ALGORITHMS), str(product)
            kept = self._read().get(name)
            if kept is None:
                kept = self._fastest(self._cublas, product, prepared, weights, x, out)
                self._keep(name, kept)
            if not kept:
                return None
            algorithm = bytes.fromhex(kept)
            return _Chosen(prepared, algorithm) if self._cublas.fits(prepared, algorithm) else None
        except (CublasError, ValueError) as failure:
            _log.info("%s uses the library's own choice: %s", product, failure)
            return None

    def _fastest(
        self,
        cublas: Cublas,
        product: CublasProduct,
        prepared: PreparedProduct,
        weights: list[torch.Tensor],
        x: torch.Tensor,
        out: torch.Tensor,
    ) -> str:
        """The algorithm in hexadecimal; "": torch's."""
        tried = dict.fromkeys(prepared.algorithms)
        for tokens in _NEIGHBOURS:
            other = cublas.prepare(CublasProduct(tokens, product.rows, product.columns), _ALGORITHMS)
            tried |= dict.fromkeys(other.algorithms)

        x = torch.randn_like(x)  # what a rehearsal is fed is zeros, which a GPU multiplies faster

        def multiply(algorithm: bytes | None, layers: list[torch.Tensor]) -> None:
            for weight in layers:
                if algorithm is None:
                    torch.mm(x, weight.t(), out=out)
                else:
                    cublas.multiply(prepared, algorithm, weight, x, out)

        def rough(algorithm: bytes) -> float:
            multiply(algorithm, weights[:1])  # for what the library sets up
            return 1e3 * device_seconds(partial(multiply, algorithm, weights[:_FEW_LAYERS]))

        few = sorted((rough(one), one) for one in tried if cublas.fits(prepared, one))[:_FINALISTS]
        last: list[bytes | None] = [None, *(one for _, one in few)]
        graphs = [_captured(partial(multiply, one, weights)) for one in last]
        # The rounds alternate, since the clock of a GPU that gets warm falls.
        rounds = [[1e3 * device_seconds(graph.replay) for graph in graphs] for _ in range(_ROUNDS)]
        times = [min(each) for each in zip(*rounds, strict=True)]
        best = min(range(len(last)), key=lambda at: times[at])
        _log.info("%s: %.3f of the library's time, of %d algorithms", product, times[best] / times[0], len(tried))
        chosen = last[best]
        return "" if chosen is None or times[best] > times[0] * (1 - _LEAST_GAIN) else chosen.hex()

    def _read(self) -> dict[str, str]:
        try:
            found = {} if self._kept is None else json.loads(self._kept.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _keep(self, product: str, algorithm: str) -> None:
        if self._kept is None:
            return
        try:
            keep(self._kept, json.dumps({**self._read(), product: algorithm}).encode())
        except OSError as failure:
            _log.warning("the choice of the fastest products could not be saved: %s", failure)


def _captured(enqueue: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Measures within a graph, as used: there the memset of some algorithms costs time of its own."""
    enqueue()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        enqueue()
    finally:
        graph.capture_end()
    graph.replay()
    return graph


def _library(device: torch.device | None) -> Cublas | None:
    if device is None:
        return None
    try:
        return Cublas(device)
    except CublasError as failure:
        _log.info("products go by the library's own choice: %s", failure)
        return None
