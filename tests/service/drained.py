"""How calls may end while a server closes its port, one after another on one connection."""

from __future__ import annotations

from collections.abc import Sequence

import grpc


def one_at_most_in_the_gap(ends: Sequence[object]) -> bool:
    """Whether none was CANCELLED but, at most, one: gRPC drops what comes between its shutdown and the client's hearing
    of it (docs, Known limits). Who waits for answers has one call then, and hears GOAWAY before its end, so that what
    it calls afterwards is UNAVAILABLE."""
    if grpc.StatusCode.CANCELLED not in ends:
        return True
    at = ends.index(grpc.StatusCode.CANCELLED)
    return all(end is grpc.StatusCode.UNAVAILABLE for end in ends[at + 1 :])
