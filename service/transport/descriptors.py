"""Descriptors of the process: how many there may be, and how they are divided among the ports.

A port whose connections took the last descriptor would take everybody's: probes, scrapes, the engine's restart. So each
port has a number of connections of its own, and what remains is kept for the rest of the process.
"""

from __future__ import annotations

import logging
import resource

_ENOUGH = 65_536  # where the hard limit is in the millions, code that walks through all descriptors would take seconds
_RESERVE = 256  # models' files, Redis, the engine process and its restart, and whatever else opens one
SIDE_PORT = 64  # connections of each port that is not for callers: admin, health, metrics
_SIDE_PORTS = 3
_LEAST = 16
_log = logging.getLogger(__name__)


def connections(wanted: int) -> int:
    """How many the data port may have: as many as wanted, where the limit of descriptors has room for them. Raises the
    soft limit as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        most = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
        if soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
        room = max(_LEAST, soft - _SIDE_PORTS * SIDE_PORT - _RESERVE)
        if room < wanted:
            _log.warning("the data port takes %d connections instead of %d: %d descriptors", room, wanted, soft)
            return room
    return wanted
