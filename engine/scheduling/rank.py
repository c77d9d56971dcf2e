"""Orders sequences by rank, and finds when their time is up.

The rank is arrival, advanced by AGING seconds a priority level, and by the front where tenants take turns. A sequence
that waits longer is overtaken no more, so none starves, and since the lowest rank is never preempted, every step makes
progress.
"""

from __future__ import annotations

from engine.api import AGING
from engine.scheduling.sequence import Sequence


def rank(sequence: Sequence) -> tuple[float, int]:
    """The lower is served first; no two are alike."""
    request = sequence.request
    return request.arrived_at - AGING * request.priority - request.forward, sequence.key


def timer(sequence: Sequence) -> float | None:
    request = sequence.request
    times = [time for time in (request.deadline, request.expires_at) if time is not None]
    return min(times, default=None)
