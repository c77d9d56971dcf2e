"""Ports for servers that must be told theirs."""

from __future__ import annotations

import socket

import pytest

from bench import redis_server


def test_no_port_is_given_twice_or_where_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        last = taken.getsockname()[1]
        few = range(last - 39, last + 1)
        monkeypatch.setattr(redis_server, "_OURS", few)
        monkeypatch.setattr(redis_server, "_TRIES", 40)
        found = [redis_server.free_port() for _ in range(20)]
        assert len(set(found)) == 20, "who was given one may not listen there yet"
        assert last not in found
        assert set(found) <= set(few)
