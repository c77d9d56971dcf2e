"""Writes the reference pages of docs/ that follow from the code or from a table; with --check, fails where they differ.

python -m scripts.references [--check]    # `make docs`
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from scripts.figures import ROOT
from scripts.reference_adrs import adrs_page
from scripts.reference_glossary import glossary_page
from scripts.reference_metrics import metrics_page
from scripts.reference_settings import settings_page

PAGES: Mapping[str, Callable[[], str]] = {
    "docs/operations/settings.md": settings_page,
    "docs/operations/metrics.md": metrics_page,
    "docs/glossary.md": lambda: glossary_page(ROOT),
    "docs/adr/README.md": lambda: adrs_page(ROOT / "docs" / "adr"),
}


def stale(root: Path) -> list[str]:
    return [name for name, page in PAGES.items() if not (root / name).exists() or read(root / name) != page()]


def read(path: Path) -> str:
    return path.read_text("utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where a page differs")
    check = parser.parse_args().check
    try:
        wrong = stale(ROOT)
    except ValueError as error:
        sys.exit(str(error))
    if not check:
        for name in wrong:
            (ROOT / name).write_text(PAGES[name](), "utf-8")
    elif wrong:
        sys.exit(f"{', '.join(wrong)}: not up to date; `make docs` writes them")


if __name__ == "__main__":
    main()
