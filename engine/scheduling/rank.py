"""Who goes first, and when time is up.

All order comes from one rank: arrival, put forward by AGING seconds a priority level, and as the front
says where tenants take turns. Who waits longer than that is
overtaken no more, so nobody starves, and since the lowest rank is never preempted, every step brings the whole nearer
to its end.
"""

from __future__ import annotations

from engine.api import AGING
from engine.scheduling.sequence import Sequence


def rank(sequence: Sequence) -> tuple[float, int]:
    """Who goes first: the lower. No two are alike."""
    request = sequence.request
    return request.arrived_at - AGING * request.priority - request.forward, sequence.key


def timer(sequence: Sequence) -> float | None:
    """The earlier of deadline and expiry."""
    request = sequence.request
    times = [time for time in (request.deadline, request.expires_at) if time is not None]
    return min(times, default=None)
