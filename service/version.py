"""The version that runs, as it is installed."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """Reads a file of the installation."""
    try:
        return metadata.version("whippet-serve")
    except metadata.PackageNotFoundError:
        return "(not installed)"
