"""Finds stop strings in a text that arrives in pieces.

The match that ends first wins; of several that end at the same place, the longest. So cuts change nothing, and only
text that could still become a match is withheld.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Aho and Corasick's automaton over characters: each costs one step, however many stops there are."""

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        if "" in stops:
            raise ValueError("a stop string is empty")
        self._include_stop = include_stop
        self._firsts = frozenset(stop[0] for stop in stops)
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]  # the longest stop that ends here
        self._fall = [0]  # the node of the longest proper suffix
        for stop in stops:
            self._add(stop)
        self._link()
        self._node = 0
        self._held = ""  # as long as the node is deep

    def feed(self, text: str, allowed: bool) -> tuple[str, str | None]:
        """Returns what may be sent, and the stop that matched; unless `allowed`, a match is text."""
        if not self._node and self._firsts.isdisjoint(text):
            return text, None
        node = self._node
        whole = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            node = self._step(node, char)
            stop = self._match[node]
            if stop is not None and allowed:
                self._node, self._held = 0, ""
                return whole[: end if self._include_stop else end - len(stop)], stop
        while node and not self._next[node]:  # nothing goes on from here
            node = self._fall[node]
        out = len(whole) - self._depth[node]
        self._node, self._held = node, whole[out:]
        return whole[:out], None

    def flush(self) -> str:
        held, self._node, self._held = self._held, 0, ""
        return held

    def _step(self, node: int, char: str) -> int:
        while node and char not in self._next[node]:
            node = self._fall[node]
        return self._next[node].get(char, 0)

    def _add(self, stop: str) -> None:
        node = 0
        for char in stop:
            child = self._next[node].get(char)
            if child is None:
                child = len(self._next)
                self._next[node][char] = child
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._match.append(None)
                self._fall.append(0)
            node = child
        self._match[node] = stop

    def _link(self) -> None:
        """Links breadth first, since shorter suffixes are needed first."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._next[node].items():
                fall = self._fall[node]
                self._fall[child] = self._step(fall, char)
                if self._match[child] is None:
                    self._match[child] = self._match[self._fall[child]]
                queue.append(child)
