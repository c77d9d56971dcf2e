"""Writes the figures of README.md and docs/*.md from bench/results/*.json; with --check, fails where they differ.

A table stands between `<!-- figures: NAME -->` and `<!-- /figures -->` on lines of their own, a figure in a sentence
between `<!-- f: NAME -->` and `<!-- /f -->`. NAME is a renderer in `scripts.figure_tables`, which has the pictures as
well. Figures of docs/measurements belong to the commit that they name and are never rewritten.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from scripts.figure_tables import PICTURES, RENDERERS
from scripts.results import FigureError, Renderer, Results, nameless, older

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- figures: (\S+) -->\n)(.*?)(<!-- /figures -->)", re.DOTALL)
INLINE = re.compile(r"(<!-- f: (\S+) -->)(.*?)(<!-- /f -->)")
MARKER = re.compile(r"<!-- ?/?f(?:igures)?\b[^>]*-->")


def render(text: str, results: Results, renderers: Mapping[str, Renderer]) -> str:
    """Renders anew what stands between the markers of `text`. Raises FigureError."""

    def fill(found: re.Match[str]) -> str:
        opening, name, old, closing = found.groups()
        if MARKER.search(old):
            raise FigureError(f"marker {name} is not closed")
        if name not in renderers:
            raise FigureError(f"no renderer is named {name}")
        try:
            new = renderers[name](results)
        except (KeyError, IndexError, StopIteration, TypeError) as error:
            raise FigureError(f"{name}: the result files lack {error!r}") from error
        return f"{opening}{new}{closing}"

    if stray := MARKER.search(INLINE.sub("", BLOCK.sub("", text))):
        raise FigureError(f"marker {stray[0]} has no other half")
    return INLINE.sub(fill, BLOCK.sub(fill, text))


def names(text: str) -> set[str]:
    return {found[2] for pattern in (BLOCK, INLINE) for found in pattern.finditer(text)}


def documents(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def update(
    root: Path, renderers: Mapping[str, Renderer], write: bool, pictures: Mapping[str, Renderer] | None = None
) -> list[str]:
    """Returns what is wrong, a line each; with `write`, documents and pictures that differ are rewritten instead."""
    wrong = []
    results = Results(root / "bench" / "results")
    drawn = {root / name: picture for name, picture in (pictures or {}).items()}
    for path in [*documents(root), *drawn]:
        text = path.read_text("utf-8") if path.exists() else ""
        try:
            fresh = drawn[path](results) if path in drawn else render(text, results, renderers)
        except FigureError as error:
            wrong.append(f"{path.relative_to(root)}: {error}")
            continue
        if fresh == text:
            continue
        if write:
            path.write_text(fresh, "utf-8")
        else:
            wrong.append(f"{path.relative_to(root)}: {difference(text, fresh)}")
    return wrong


def difference(text: str, fresh: str) -> str:
    """Returns the first line that differs, as it stands and as it should be."""
    pairs = zip([*text.splitlines(), ""], [*fresh.splitlines(), ""], strict=False)
    number, (old, new) = next((i, pair) for i, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    return f"line {number} is not what bench/results has\n  is        {old}\n  should be {new}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where a figure differs")
    wrong = update(ROOT, RENDERERS, not parser.parse_args().check, PICTURES)
    if unknown := nameless(ROOT):
        wrong.append(f"neither a commit nor a hash of the code: {', '.join(unknown)}")
    if aged := older(ROOT):
        print(f"{len(aged)} results are older than the code that they measure (no failure):", *aged, sep="\n  ")
    if wrong:
        sys.exit("\n".join([*wrong, "`python -m scripts.figures` writes the figures from bench/results"]))


if __name__ == "__main__":
    main()
