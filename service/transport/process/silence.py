"""What gRPC prints past the log."""

from __future__ import annotations

import traceback
from types import SimpleNamespace

from grpc._cython import cygrpc  # type: ignore[attr-defined]


def silence() -> None:
    """Some errors are logged by gRPC and then printed to stderr as well, with `traceback.print_exc`: one is had by a
    path that is no UTF-8 on a connection that is closed at once. Nothing bounds how often."""
    cygrpc.traceback = SimpleNamespace(print_exc=lambda: None, format_exception=traceback.format_exception)
