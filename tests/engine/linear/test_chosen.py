"""Which product a shape gets, without a GPU: what is kept between two starts, and when torch's own stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.linear import DenseLinear, chosen
from engine.linear.chosen import ChosenProducts
from engine.linear.cublas import CublasError, CublasProduct, PreparedProduct

OWN, OTHER = b"own", b"other"


class Library:
    """Two algorithms, of which the second is right and the first fails, so that torch's product shows."""

    name = "a-gpu-1.json"

    def __init__(self) -> None:
        self.done: list[bytes] = []

    def prepare(self, wanted: CublasProduct, most: int) -> PreparedProduct:
        return PreparedProduct(wanted, None, None, None, (OWN, OTHER))

    def fits(self, how: PreparedProduct, algorithm: bytes) -> bool:
        return algorithm in (OWN, OTHER)

    def multiply(self, how: PreparedProduct, algorithm: bytes, weights: Any, x: Any, out: Any) -> None:
        assert how.product == CublasProduct(x.shape[0], *weights.shape)
        self.done.append(algorithm)
        out.copy_(x @ weights.t())


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """Of weights of any size and on any device."""
    made = Library()
    monkeypatch.setattr(chosen, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(chosen, "_library", lambda device: made)
    return made


def made(folder: Path, weight: torch.Tensor) -> ChosenProducts:
    products = ChosenProducts([DenseLinear(weight)], folder)
    products._weights = {(weight.shape[0], weight.shape[1]): [weight]}  # as if they lay on a GPU
    return products


def product(products: ChosenProducts, weight: torch.Tensor, tokens: int) -> None:
    x, out = torch.randn(tokens, weight.shape[1]), torch.full((tokens, weight.shape[0]), float("nan"))
    products.multiply(weight, x, out)
    torch.testing.assert_close(out, x @ weight.t())


def test_without_a_gpu_torch_multiplies() -> None:
    weight = torch.randn(8, 16)
    for products in (ChosenProducts(), ChosenProducts([DenseLinear(weight)])):
        product(products, weight, 256)


def test_what_was_chosen_once_is_taken_again(tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(8, 16)
    monkeypatch.setattr(ChosenProducts, "_fastest", lambda *_: OTHER.hex())
    product(made(tmp_path, weight), weight, 256)
    assert library.done == [OTHER]
    kept = json.loads((tmp_path / library.name).read_text())
    assert kept == {str(CublasProduct(256, 8, 16)): OTHER.hex()}

    monkeypatch.setattr(ChosenProducts, "_fastest", lambda *_: pytest.fail("timed again"))
    again = made(tmp_path, weight)
    product(again, weight, 256)
    product(again, weight, 256)
    assert library.done == [OTHER] * 3


@pytest.mark.parametrize("kept", ["", b"gone".hex(), "no hex"])
def test_where_nothing_is_faster_or_what_was_kept_does_not_fit_torch_multiplies(
    tmp_path: Path, library: Library, kept: str
) -> None:
    weight = torch.randn(8, 16)
    (tmp_path / library.name).write_text(json.dumps({str(CublasProduct(256, 8, 16)): kept}))
    product(made(tmp_path, weight), weight, 256)
    assert library.done == []


def test_other_sizes_are_not_looked_at(tmp_path: Path, library: Library) -> None:
    weight = torch.randn(8, 16)
    products = made(tmp_path, weight)
    for tokens in (1, 16, 160, 192):
        product(products, weight, tokens)
    assert library.done == []
    assert not (tmp_path / library.name).exists()


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_file_that_is_damaged_is_made_anew(
    tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    weight = torch.randn(8, 16)
    (tmp_path / library.name).write_text(text)
    monkeypatch.setattr(ChosenProducts, "_fastest", lambda *_: OTHER.hex())
    product(made(tmp_path, weight), weight, 512)
    assert json.loads((tmp_path / library.name).read_text()) == {str(CublasProduct(512, 8, 16)): OTHER.hex()}


def test_a_library_that_knows_no_algorithm_leaves_it_to_torch(
    tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(wanted: CublasProduct, most: int) -> PreparedProduct:
        raise CublasError("no algorithm")

    monkeypatch.setattr(library, "prepare", none)
    weight = torch.randn(8, 16)
    product(made(tmp_path, weight), weight, 256)
