"""Suppresses what gRPC prints past the log."""

from __future__ import annotations

import traceback
from types import SimpleNamespace

from grpc._cython import cygrpc  # type: ignore[attr-defined]


def silence() -> None:
    """Stops gRPC from printing errors to stderr after logging them, which any caller can cause without bound."""
    cygrpc.traceback = SimpleNamespace(print_exc=lambda: None, format_exception=traceback.format_exception)
