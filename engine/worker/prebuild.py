"""Compiles products in C ahead, for every level of CPU: `python -m engine.worker.prebuild --into FOLDER`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from engine.linear.products import NoProducts, build_ahead


def main() -> int:
    """Prints the files."""
    parser = argparse.ArgumentParser(prog="python -m engine.worker.prebuild", allow_abbrev=False)
    parser.add_argument("--into", type=Path, metavar="FOLDER", required=True)
    folder: Path = parser.parse_args().into
    folder.mkdir(parents=True, exist_ok=True)
    try:
        made = build_ahead(folder)
    except NoProducts as failure:
        sys.stderr.write(f"whippet: {failure}\n")
        return 1
    sys.stdout.write("".join(f"{path}\n" for path in made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
