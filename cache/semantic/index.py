"""Indexes the vectors of one partition: brute force while they are few, a graph once they are many. Used by one
thread."""

from __future__ import annotations

from typing import Any

import numpy as np

from cache.semantic.embedder import Vector

GRAPH_AT = 5000  # entries
FEWEST = 4  # rows that there is always room for
STEP = 8  # vectors that move into the graph with every call, so that none takes long
CONNECTIVITY = 16
EXPANSION = 64


class VectorIndex:
    def __init__(self, width: int, graph_at: int = GRAPH_AT) -> None:
        self._width = width
        self._graph_at = graph_at
        self._rows = np.empty((FEWEST, width), np.float32)
        self._names: list[str] = []
        self._place: dict[str, int] = {}
        self._graph: _Graph | None = None
        self.changes = 0  # additions so far

    def __len__(self) -> int:
        return len(self._names) + (len(self._graph) if self._graph else 0)

    def __contains__(self, name: str) -> bool:
        return name in self._place or (self._graph is not None and name in self._graph)

    def add(self, name: str, vector: Vector) -> None:
        """Replaces an earlier vector of that name."""
        self.changes += 1
        self.remove(name)
        if self._graph is None and len(self._names) >= self._graph_at:
            self._graph = _Graph(self._width)
        self._append(name, vector)
        self._move()

    def remove(self, name: str) -> None:
        if self._graph is not None:
            self._graph.remove(name)
        place = self._place.pop(name, None)
        if place is None:
            return
        last = self._names.pop()
        if last != name:
            self._names[place] = last
            self._place[last] = place
            self._rows[place] = self._rows[len(self._names)]

    def search(self, vector: Vector, count: int) -> list[tuple[str, float]]:
        self._move()
        found: list[tuple[str, float]] = []
        if self._names:
            near = self._rows[: len(self._names)] @ vector
            best = np.argpartition(-near, min(count, len(near)) - 1)[:count]
            found = [(self._names[i], float(near[i])) for i in best]
        if self._graph is not None:
            found += self._graph.search(vector, count)
        return sorted(found, key=lambda pair: -pair[1])[:count]

    def _append(self, name: str, vector: Vector) -> None:
        place = len(self._names)
        if place == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[place] = vector
        self._names.append(name)
        self._place[name] = place

    def _move(self) -> None:
        if self._graph is None:
            return
        for _ in range(min(STEP, len(self._names))):
            name = self._names.pop()
            self._graph.add(name, self._rows[self._place.pop(name)])
        if not self._names and len(self._rows) > FEWEST:
            self._rows = np.empty((FEWEST, self._width), np.float32)


class _Graph:
    def __init__(self, width: int) -> None:
        from usearch.index import Index

        self._index: Any = Index(
            ndim=width, metric="ip", dtype="f16", connectivity=CONNECTIVITY, expansion_search=EXPANSION
        )
        self._names: dict[int, str] = {}
        self._keys: dict[str, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def add(self, name: str, vector: Vector) -> None:
        self._index.add(self._next, vector)
        self._names[self._next] = name
        self._keys[name] = self._next
        self._next += 1

    def remove(self, name: str) -> None:
        key = self._keys.pop(name, None)
        if key is not None:
            self._index.remove(key)
            del self._names[key]

    def search(self, vector: Vector, count: int) -> list[tuple[str, float]]:
        if not self._keys:
            return []
        found = self._index.search(vector, count)
        return [
            (self._names[int(key)], 1.0 - float(distance))
            for key, distance in zip(found.keys, found.distances, strict=True)
            if int(key) in self._names
        ]
