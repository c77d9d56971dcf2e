"""Decides by syntax which chat templates are cheap enough to be compiled and rendered in the front.

A plain template loops over messages alone, never nested, and calls nothing that makes a long text of a short one.
Unknown syntax is not plain, so this may be strict. It is no guard against escapes from the sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeGuard

from jinja2 import nodes

MAX_SOURCE = 64 * 2**10  # characters
_MAX_NODES = 1500
_LISTS = frozenset({"messages", "tools", "documents"})  # what a template is given to loop over; the last two are None
_TEXTS = frozenset({"content", "role"})  # of a message: to loop over them is to loop over characters
_RESERVED = frozenset({"loop", "namespace", "raise_exception", "strftime_now"})
_FILTERS = frozenset({"trim", "upper", "lower", "length", "count", "string", "first", "last", "safe"})
_METHODS = frozenset({"strip", "lstrip", "rstrip", "startswith", "endswith", "split", "upper", "lower", "get"})
_TESTS = frozenset({"defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "integer"})
_TESTS |= {"boolean", "true", "false", "odd", "even", "in", "eq", "ne", "equalto"}
_CHEAP = (
    nodes.Template,
    nodes.Output,
    nodes.TemplateData,
    nodes.Const,
    nodes.Name,
    nodes.NSRef,
    nodes.Getattr,
    nodes.Getitem,
    nodes.Slice,
    nodes.If,
    nodes.CondExpr,
    nodes.Compare,
    nodes.Operand,
    nodes.And,
    nodes.Or,
    nodes.Not,
    nodes.Neg,
    nodes.Sub,
    nodes.Add,
    nodes.Concat,
    nodes.Keyword,
    nodes.Scope,
    nodes.Break,
    nodes.Continue,
)
_TIME = re.compile(r"([^%]|%[A-Za-z%]){0,100}")  # a width could be a billion


def is_plain(template: nodes.Template) -> bool:
    """Whether a short chat may be rendered on the event loop."""
    every = list(_below(template))
    if len(every) > _MAX_NODES:
        return False
    assigned = [node for node in every if isinstance(node, nodes.Assign)]
    lists = _lists(assigned)
    if lists is None or not _grow_once(assigned) or not _closed(every, assigned):
        return False
    return all(_cheap(node) for node in every) and _loops(template, lists, False)


def _below(node: nodes.Node) -> Iterator[nodes.Node]:
    left = [node]
    while left:
        one = left.pop()
        yield one
        left.extend(one.iter_child_nodes())


def _cheap(node: nodes.Node) -> bool:
    """Judges the node alone; loops and growth are checked elsewhere."""
    match node:
        case nodes.For():
            return not node.recursive and _names(node.target).isdisjoint(_LISTS | _RESERVED)
        case nodes.Assign():
            return _names(node.target).isdisjoint(_RESERVED) and len(_names(node.target)) == 1
        case nodes.Filter():
            return _cheap_filter(node)
        case nodes.Test():
            return node.name in _TESTS and not node.dyn_args and not node.dyn_kwargs and not _grows(node)
        case nodes.Call():
            return _cheap_call(node)
        case nodes.Mod():  # of a text it would format
            return isinstance(node.left, nodes.Getattr) and _is_name(node.left.node, "loop")
        case _:
            return isinstance(node, _CHEAP)


def _cheap_filter(node: nodes.Filter) -> bool:
    if node.node is None or node.kwargs or node.dyn_args or node.dyn_kwargs:
        return False
    if node.name == "tojson":  # every one doubles backslashes
        return not node.args and not _grows(node.node)
    if node.name in ("default", "d"):
        return len(node.args) == 1
    return node.name in _FILTERS and not node.args


def _cheap_call(node: nodes.Call) -> bool:
    if node.dyn_args or node.dyn_kwargs:
        return False
    if _is_name(node.node, "raise_exception"):
        return len(node.args) == 1 and not node.kwargs
    if _is_name(node.node, "strftime_now"):
        return len(node.args) == 1 and not node.kwargs and _is_time(node.args[0])
    if any(_grows(child) for child in node.iter_child_nodes()):
        return False
    if _is_name(node.node, "namespace"):
        return not node.args
    return isinstance(node.node, nodes.Getattr) and node.node.attr in _METHODS and not node.kwargs


def _is_time(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, str) and _TIME.fullmatch(node.value) is not None


def _loops(node: nodes.Node, lists: frozenset[str], inside: bool) -> bool:
    """Whether loops run over messages only, and nested ones over fields that our messages lack."""
    if isinstance(node, nodes.For):
        if not (_is_absent(node.iter) if inside else _is_list(node.iter, lists) or _is_absent(node.iter)):
            return False
        inside = True
    return all(_loops(child, lists, inside) for child in node.iter_child_nodes())


def _is_list(node: nodes.Node, lists: frozenset[str]) -> bool:
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_list(node.node, lists)
    return isinstance(node, nodes.Name) and node.name in lists


def _is_absent(node: nodes.Node) -> bool:
    """`message.tool_calls` or the like: our messages have only a role and a content."""
    if isinstance(node, nodes.Getattr):
        return isinstance(node.node, nodes.Name) and node.attr not in _TEXTS and node.node.name not in _RESERVED
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        named = isinstance(node.arg.value, str) and node.arg.value not in _TEXTS
        return named and isinstance(node.node, nodes.Name) and node.node.name not in _RESERVED
    return False


def _lists(assigned: list[nodes.Assign]) -> frozenset[str] | None:
    """Names that only ever stand for messages; None where one of _LISTS may be something else."""
    lists = set(_LISTS)
    for _ in assigned:  # until nothing is added; a chain is no longer than that
        for node in assigned:
            if isinstance(node.target, nodes.Name) and _is_list(node.node, frozenset(lists)):
                lists.add(node.target.name)
    for node in assigned:
        names = _names(node.target)
        if not names.isdisjoint(lists) and not _is_list(node.node, frozenset(lists)):
            if not names.isdisjoint(_LISTS):
                return None
            lists -= names
    return frozenset(lists)


def _grow_once(assigned: list[nodes.Assign]) -> bool:
    """No text is added to itself repeatedly: `x = x + x` again and again makes billions."""
    grown: set[str] = set()
    for _ in assigned:
        grown |= {
            name
            for node in assigned
            if _grows(node.node) or _mentions(node.node, grown)
            for name in _names(node.target)
        }
    for node in assigned:
        kept = isinstance(node.target, nodes.NSRef)  # outlives the turn of a loop
        if _mentions(node.node, grown) and (_grows(node.node) or kept):
            return False
        if kept and _grows(node.node):
            return False
    return True


def _grows(node: nodes.Node) -> bool:
    every = list(_below(node))
    picked = {id(one.node) for one in every if _picks(one)}  # a text out of a list, and not the list as text
    return any(_grows_by_itself(one) for one in every if id(one) not in picked)


def _grows_by_itself(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Add):
        return not any(
            isinstance(side, nodes.Const) and isinstance(side.value, int) for side in (node.left, node.right)
        )
    if isinstance(node, nodes.Call):  # as text, a list has quotes, and twice the backslashes
        return isinstance(node.node, nodes.Getattr) and node.node.attr == "split"
    return isinstance(node, nodes.Concat) or (isinstance(node, nodes.Filter) and node.name == "tojson")


def _picks(node: nodes.Node) -> TypeGuard[nodes.Getitem | nodes.Filter]:
    if isinstance(node, nodes.Getitem):
        return not isinstance(node.arg, nodes.Slice)
    return isinstance(node, nodes.Filter) and node.name in ("first", "last")


def _closed(every: list[nodes.Node], assigned: list[nodes.Assign]) -> bool:
    """Namespaces are used for their attributes only: as text, one has all of it."""
    spaces = {
        name
        for node in assigned
        if isinstance(node.node, nodes.Call) and _is_name(node.node.node, "namespace")
        for name in _names(node.target)
    }
    opened = {id(one.node) for one in every if isinstance(one, nodes.Getattr)} | {id(one.target) for one in assigned}
    return all(id(one) in opened for one in every if isinstance(one, nodes.Name) and one.name in spaces)


def _mentions(node: nodes.Node, names: set[str]) -> bool:
    return any(isinstance(one, nodes.Name) and one.name in names for one in _below(node))


def _names(target: nodes.Node) -> set[str]:
    return {one.name for one in _below(target) if isinstance(one, nodes.Name | nodes.NSRef)}


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name
