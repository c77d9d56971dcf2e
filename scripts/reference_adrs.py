"""Writes docs/adr/README.md: the index of decisions, from the headings of their pages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from scripts.cells import table

HEAD = """# Decisions

Each page is one decision that binds others, at most a page long: context, decision, what was not chosen.
`python -m scripts.references` writes this index from the pages' headings. Numbers are never given out twice.
"""
# A number whose page is gone → the page that holds what still binds of it.
MERGED: Mapping[int, int] = {
    4: 28,
    24: 5,
    39: 43,
    41: 40,
    45: 17,
    46: 34,
    49: 43,
    53: 40,
    57: 44,
    58: 44,
    60: 44,
}
PAGE = re.compile(r"(\d{4})-[\w-]+\.md")
TITLE = re.compile(r"# (\d+)\. (.+)\n")


def pages(folder: Path) -> dict[int, tuple[str, str]]:
    """Returns number → file name and title. Raises ValueError for a page whose heading has another number, or none."""
    found: dict[int, tuple[str, str]] = {}
    for path in sorted(folder.glob("[0-9]*.md")):
        name, title = PAGE.fullmatch(path.name), TITLE.match(path.read_text("utf-8"))
        if name is None or title is None or int(name[1]) != int(title[1]):
            raise ValueError(f"{path.name}: its name and its heading (`# N. Title`) need the same number")
        if int(name[1]) in found:
            raise ValueError(f"{path.name}: another page has this number")
        found[int(name[1])] = (path.name, title[2])
    return found


def adrs_page(folder: Path) -> str:
    found = pages(folder)
    if wrong := [gone for gone, kept in MERGED.items() if gone in found or kept not in found]:
        raise ValueError(f"decisions {wrong} are listed as merged into others")
    rows = ([f"[{number:04}]({name})", title] for number, (name, title) in found.items())
    merged = ", ".join(f"{gone:04} → [{kept:04}]({found[kept][0]})" for gone, kept in MERGED.items())
    return f"{HEAD}\n{table(['number', 'decision'], rows)}\nMerged: {merged}.\n"
