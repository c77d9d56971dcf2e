"""Frees what gRPC keeps of an error longer than needed."""

from __future__ import annotations


def forget_frames(error: BaseException | None) -> None:
    """Frames hold a call's message until the next full collection, since gRPC makes a cycle of the error."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
