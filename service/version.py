"""Returns the installed version."""

from __future__ import annotations

from functools import cache


@cache
def version() -> str:
    from importlib import metadata  # 50 ms that a server's start need not pay

    try:
        return metadata.version("whippet-serve")
    except metadata.PackageNotFoundError:
        return "(not installed)"
