"""Finds chains of references that are too deep, without recursion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping


def deepest(nodes: Mapping[str, tuple[int, Iterable[str]]], most: int) -> str | None:
    """The first node, users before what they use, at which a chain becomes deeper than `most`. `nodes` have their own
    depth and the names that they use. All nodes of a cycle count."""
    edges = {name: [used for used in uses if used in nodes] for name, (_, uses) in nodes.items()}
    circles = _circles(edges)
    circle_of = {name: index for index, circle in enumerate(circles) for name in circle}
    above = [0] * len(circles)  # depth of the deepest chain of users of each component
    for index in range(len(circles) - 1, -1, -1):  # those that are used come before their users
        depth = above[index]
        for name in circles[index]:
            depth += nodes[name][0]
            if depth > most:
                return name
        for name in circles[index]:
            for used in edges[name]:
                other = circle_of[used]
                if other != index:
                    above[other] = max(above[other], depth)
    return None


def _circles(edges: Mapping[str, list[str]]) -> list[list[str]]:
    """Tarjan's strongly connected components, each before its users."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found: list[list[str]] = []
    for root in edges:
        if root in number:
            continue
        todo: list[tuple[str, Iterator[str]]] = [(root, iter(edges[root]))]
        number[root] = lowest[root] = len(number)
        stack.append(root)
        on_stack.add(root)
        while todo:
            name, rest = todo[-1]
            used = next(rest, None)
            if used is None:
                todo.pop()
                if todo:
                    lowest[todo[-1][0]] = min(lowest[todo[-1][0]], lowest[name])
                if lowest[name] == number[name]:
                    found.append(_unstacked(stack, on_stack, name))
            elif used not in number:
                number[used] = lowest[used] = len(number)
                stack.append(used)
                on_stack.add(used)
                todo.append((used, iter(edges[used])))
            elif used in on_stack:
                lowest[name] = min(lowest[name], number[used])
    return found


def _unstacked(stack: list[str], on_stack: set[str], name: str) -> list[str]:
    circle = []
    while True:
        top = stack.pop()
        on_stack.discard(top)
        circle.append(top)
        if top == name:
            return circle
