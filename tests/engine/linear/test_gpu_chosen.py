"""Products by algorithms that were timed, on a GPU: right by every one of them, and the same after another start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.linear import DenseLinear
from engine.linear.chosen import ChosenProducts
from engine.linear.cublas import Cublas, CublasProduct

pytestmark = pytest.mark.gpu
SHAPES = [(4096, 4096), (4096, 14336), (14336, 1024)]


def random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda").bfloat16()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [256, 384])
def test_every_algorithm_multiplies(shape: tuple[int, int], tokens: int) -> None:
    weight, x = random(*shape), random(tokens, shape[1])
    library = Cublas(weight.device)
    prepared = library.prepare(CublasProduct(tokens, *shape), 8)
    expected = x.double() @ weight.double().t()
    for algorithm in prepared.algorithms:
        assert library.fits(prepared, algorithm)
        out = torch.full((tokens, shape[0]), float("nan"), device="cuda", dtype=torch.bfloat16)
        library.multiply(prepared, algorithm, weight, x, out)
        # Parts of a sum may be rounded to bfloat16 before they are added up.
        assert float((out.double() - expected).abs().max()) < 2**-7 * float(expected.abs().max())


def test_a_second_start_times_nothing_and_rounds_as_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linears, x = [DenseLinear(random(4096, 14336)) for _ in range(3)], random(384, 14336)
    found = []
    for start in range(2):
        products = ChosenProducts(linears, tmp_path)
        out = torch.empty(384, 4096, device="cuda", dtype=torch.bfloat16)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            products.multiply(linears[0].weight, x, out)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        captured = torch.empty_like(out)
        with torch.cuda.graph(graph):
            products.multiply(linears[0].weight, x, captured)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, captured)
        found.append(out)
        monkeypatch.setattr(ChosenProducts, "_fastest", lambda *_: pytest.fail("timed again"))
        assert len(list(tmp_path.iterdir())) == 1, start
    assert torch.equal(*found)
