"""Nearest neighbours against brute force, across the change from rows to graph, through additions and removals."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.semantic.index import VectorIndex
from tests.properties import example_count

WIDTH = 16


def unit(generator: np.random.Generator, count: int) -> np.ndarray:
    rows = generator.standard_normal((count, WIDTH)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def best(model: dict[str, np.ndarray], query: np.ndarray, count: int) -> list[tuple[str, float]]:
    return sorted(((name, float(row @ query)) for name, row in model.items()), key=lambda pair: -pair[1])[:count]


@given(
    steps=st.lists(st.tuples(st.sampled_from("aaar"), st.integers(0, 30)), max_size=120),
    graph_at=st.sampled_from([1, 5, 20, 1000]),
)
@settings(max_examples=example_count(60), deadline=None)
def test_agrees_with_brute_force(steps: list[tuple[str, int]], graph_at: int) -> None:
    generator = np.random.default_rng(1)
    vectors = unit(generator, len(steps))
    index = VectorIndex(WIDTH, graph_at)
    model: dict[str, np.ndarray] = {}
    for (verb, number), vector in zip(steps, vectors, strict=True):
        name = str(number)
        if verb == "a":
            index.add(name, vector)
            model[name] = vector
        else:
            index.remove(name)
            model.pop(name, None)
        assert len(index) == len(model)
        assert (name in index) == (name in model)
    query = unit(generator, 1)[0]
    found, expected = index.search(query, 4), best(model, query, 4)
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert np.allclose([s for _, s in found], [s for _, s in expected], atol=2e-3)


def test_recall_and_size_after_the_change() -> None:
    generator = np.random.default_rng(2)
    rows = unit(generator, 3000)
    index = VectorIndex(WIDTH, 500)
    for number, row in enumerate(rows):
        index.add(str(number), row)
    assert len(index) == 3000
    queries = rows[::30] + 0.05 * unit(generator, 100)
    hits = sum(index.search(query, 1)[0][0] == best_of(rows, query) for query in queries)
    assert hits >= 97


def best_of(rows: np.ndarray, query: np.ndarray) -> str:
    return str(int(np.argmax(rows @ query)))


def test_an_empty_one_finds_nothing() -> None:
    assert VectorIndex(WIDTH).search(np.ones(WIDTH, np.float32), 4) == []
