"""Derives from a template's syntax what it takes beside a role and a text."""

from __future__ import annotations

from jinja2 import nodes

_TOOLS = "tools"
_CONTENT = "content"
_KINDS = frozenset({"string", "iterable", "sequence", "mapping"})  # tests that tell a text from a list of parts


def mentions_tools(template: nodes.Template) -> bool:
    """A template that does not would leave tools out in silence."""
    return any(name.name == _TOOLS and name.ctx == "load" for name in template.find_all(nodes.Name))


def looks_into_content(template: nodes.Template) -> bool:
    """Whether the template loops over a message's content, or tests its type. Otherwise lists of parts fail, or are
    printed as Python does."""
    if any(test.name in _KINDS for test in template.find_all(nodes.Test)):
        return True
    held = {_CONTENT} | {
        node.target.name
        for node in template.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _reads(node.node, {_CONTENT})
    }
    return any(_reads(loop.iter, held) for loop in template.find_all(nodes.For))


def _reads(node: nodes.Node, names: set[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr) and node.attr in names:
        return True
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value in names:
        return True
    return any(_reads(child, names) for child in node.iter_child_nodes())
