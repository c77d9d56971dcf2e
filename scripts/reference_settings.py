"""Writes docs/operations/settings.md: every leaf of the settings tree, by group."""

from __future__ import annotations

import enum
from itertools import groupby

from scripts.cells import table
from service.config.leaves import Leaf, leaves, spelled
from service.config.settings import Settings
from service.core.operations.reloading import LIVE_CACHE

HEAD = """# Settings

`python -m scripts.references` writes this page from the settings tree. [Running Whippet](README.md#settings) explains
flags, environment variables and files. A default of – means unset; the description says what that means. Settings
marked ↻ take effect [without a restart](README.md#changing-settings).
"""
LIVE_GROUP, LIVE_LEAF = "optimizations", "log-level"


def settings_page() -> str:
    parts = [HEAD]
    for group, members in groupby(sorted(leaves(Settings), key=group_of), key=group_of):
        rows = ([f"`--{leaf.name}`{reloaded(leaf)}", values(leaf), default(leaf), cell(leaf.help)] for leaf in members)
        parts.append(f"## {group or 'General'}\n\n{table(['setting', 'values', 'default', 'description'], rows)}")
    return "\n".join(parts)


def group_of(leaf: Leaf) -> str:
    return spelled(leaf.path[:-1])


def reloaded(leaf: Leaf) -> str:
    """Returns a mark for settings that a running server reads again."""
    live = leaf.name == LIVE_LEAF or leaf.path[0] == LIVE_GROUP or leaf.name in LIVE_CACHE
    return " ↻" if live else ""


def values(leaf: Leaf) -> str:
    return f"`{leaf.values.strip('{}')}`" if leaf.values.startswith("{") else leaf.values


def default(leaf: Leaf) -> str:
    value = leaf.default
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{value.value if isinstance(value, enum.Enum) else value}`"


def cell(text: str) -> str:
    return text.replace("|", "\\|")
