"""What importing brings along: a front must not load torch, and an engine neither Redis's client nor anything else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cache.semantic.embedder import ModelEmbedder

pytestmark = pytest.mark.product

HEAVY = ("torch", "grpc", "redis", "cryptography", "onnxruntime", "onnx", "usearch", "numpy", "msgspec", "transformers")


def loaded(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(' '.join(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


SEARCH = """
import numpy
from cache.open.caches import open_caches
from cache.semantic.embedder import open_embedder
from cache.semantic.export import exported
from cache.semantic.index import VectorIndex
embedder = open_embedder(exported())
index = VectorIndex(embedder.width, 1)
for text in ("one two three", "four five six", "seven eight nine"):
    index.add(text, embedder.embed(text))
assert index.search(embedder.embed("one two three"), 1)[0][0] == "one two three"
"""


@pytest.mark.parametrize(
    ("statement", "brings"),
    [
        ("import cache.api", set()),
        ("import cache.api.settings", set()),
        ("import cache.open.blocks", {"cryptography"}),
        ("import cache.open.caches", {"redis", "cryptography", "numpy", "msgspec"}),
        (SEARCH, {"redis", "cryptography", "numpy", "msgspec", "usearch"}),
    ],
)
def test_imports_bring_what_they_must_and_no_more(embedder: ModelEmbedder, statement: str, brings: set[str]) -> None:
    if statement == SEARCH and not embedder.digest.endswith("-c"):
        brings = brings | {"onnxruntime"}  # a machine where the encoder is not in C
    assert loaded(statement) == brings
