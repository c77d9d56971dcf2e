"""Ports for programs that must be told theirs. For benches and tests."""

from __future__ import annotations

import random
import socket

# Below those that the kernel gives to whoever asks for any and to outgoing connections: none of them takes one between
# our look and its use, or while a server that had it is down.
_OURS = range(10_240, 32_768)
_TRIES = 1_000
_given: set[int] = set()  # by this process, which may not listen there yet


def free_port() -> int:
    """One of the loopback that nobody listens on; never the same twice."""
    for port in random.SystemRandom().sample(_OURS, _TRIES):
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.add(port)
        return port
    raise RuntimeError("no port is free")
