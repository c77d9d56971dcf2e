"""The engine's loop beside a Redis that is sick, against the same loop beside one that is well."""

from __future__ import annotations

import pytest

from bench.redis_server import RedisServer
from tests.engine.kv.test_shared_tier_redis import Connect, connect, server, written
from tests.engine.tiered import TEXT

__all__ = ["connect", "server", "written"]


@pytest.mark.parametrize("fault", ["refused", "stalled", "readonly", "killed midway"])
def test_a_faulty_redis_costs_the_loop_nothing(
    written: list[str], connect: Connect, server: RedisServer, fault: str
) -> None:
    """A loop that waited would do so for half a second at some of its turns, which take a fraction of a millisecond.
    There are more of them beside a stalled one: the engine looks again and again."""
    well, sick = connect(), connect()
    if fault == "killed midway":
        assert sick.ask()[0] == 640
    for engine in (well, sick):
        engine.spent, engine.turns = 0.0, 0
        for turn in range(6):
            engine.ask((turn + 1, *TEXT))
            engine.ask((turn + 1, *TEXT, 3))
        if engine is well:
            match fault:
                case "refused" | "killed midway":
                    server.stop()
                case "stalled":
                    server.pause()
                case "readonly":
                    server.command("REPLICAOF", "127.0.0.1", "1")
                    server.command("FLUSHALL")
    if fault == "stalled":
        server.resume()
    assert sick.spent / sick.turns < 4 * well.spent / well.turns
