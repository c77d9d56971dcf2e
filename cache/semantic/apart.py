"""Runs our modules in Python processes of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def command(module: str, *arguments: str) -> list[str]:
    """Imports nothing from the working directory and prints no libraries' deprecation warnings."""
    return [sys.executable, "-P", "-W", "ignore", "-m", module, *arguments]


def environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
