"""Frees what gRPC keeps of an error longer than needed."""

from __future__ import annotations


def forget_frames(error: BaseException | None) -> None:
    """Frames hold what the call held, its message above all, for as long as anything refers to the error: until the
    next full collection, since gRPC makes a cycle of it."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
