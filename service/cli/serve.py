"""`whippet serve`: passes its flags to the server."""

from __future__ import annotations

from collections.abc import Sequence


def run(argv: Sequence[str]) -> int:
    from service.main import serve

    return serve(argv)
