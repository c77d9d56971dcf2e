"""Divides the process's descriptors among the ports, and keeps the remainder: a port that took the last one would leave
none for probes, scrapes and the engine's restart."""

from __future__ import annotations

import logging
import resource
from typing import NamedTuple

_ENOUGH = 65_536  # where the hard limit is in the millions, code that walks through all descriptors would take seconds
_RESERVE = 256  # models' files, Redis, the engine process and its restart, and whatever else opens one
SIDE_PORT = 64  # connections of each port that is not for callers: admin, health, metrics
_SIDE_PORTS = 3
_LEAST = 16
# Least and most connections of a port beyond its bound. The evictor closes idle connections before they run out.
_SPARE = 16, 512
_log = logging.getLogger(__name__)


class ConnectionDivision(NamedTuple):
    connections: int  # of the data port
    spare: int  # of each gRPC port, beyond its bound


def divide(wanted: int) -> ConnectionDivision:
    """Grants the data port the `wanted` connections, or what the soft limit has room for, raised as far as the hard
    limit and _ENOUGH allow."""
    least, most_spare = _SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        most = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
        if soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
        room = soft - _SIDE_PORTS * SIDE_PORT - _RESERVE
        most_connections = max(_LEAST, room - _SIDE_PORTS * least)
        # Divided among the gRPC ports: data, admin and health, which happen to be as many as the side ports.
        spare = min(most_spare, max(least, (room - wanted) // _SIDE_PORTS))
        if most_connections < wanted:
            _log.warning(
                "the data port takes %d connections instead of %d: %d descriptors", most_connections, wanted, soft
            )
        return ConnectionDivision(min(wanted, most_connections), spare)
    return ConnectionDivision(wanted, most_spare)
