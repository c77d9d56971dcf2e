"""Nothing that a caller sent reaches the log, and no caller fills it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

import pytest

from bench.floods import GENERATE, REFLECTION, Metadata, Rogue
from service.observability.logs import Reticence
from tests.service.conftest import Server, ask

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
WRONG: list[tuple[str, Metadata]] = [
    (GENERATE, ((b"authorization", b"Bearer CANARY\xff\xfe"),)),
    (GENERATE, ((b"x-request", b"CANARY\xff"), (b"authorization", b"Bearer CANARY"))),
    (GENERATE, ((b"x-bin", b"CANARY!!!"),)),
    (GENERATE, ((b"grpc-timeout", b"CANARYs"),)),
    (GENERATE, ((b"grpc-encoding", b"CANARY"),)),
    (GENERATE, ((b"content-length", b"CANARY"),)),
    ("/CANARY\udcff\udcfe", ()),
    ("/whippet.v1.GenerationService/CANARY\udcff", ()),
    ("/whippet.v1.GenerationService/CANARY", ()),
    (REFLECTION, ()),
]


@pytest.mark.parametrize("fronts", [1, 2])
@pytest.mark.parametrize("level", ["debug", "warning"])
def test_what_callers_send_is_not_logged(serve: Serve, level: str, fronts: int) -> None:
    """Headers, paths and messages that gRPC or protobuf cannot make sense of, each of them many times."""
    with serve(f"--log-level={level}", f"--server.fronts={fronts}") as server:
        before = server.log.read_text()
        for path, metadata in WRONG:
            rogue = Rogue(server.data, path.encode(errors="surrogateescape"), metadata)
            rogue.socket.sendall(b"".join(rogue.call(b"\0\0\0\0\6CANARY", ended=True) for _ in range(50)))
            assert server.generation.Generate(ask("x", 1), timeout=60).text
            rogue.finish()
        assert server.generation.Generate(ask("x", 1), timeout=60).text
        log = server.log.read_text()
        assert "CANARY" not in log
        assert "Traceback" not in log
        if level == "warning":
            assert len(log) - len(before) < 500 * fronts, log


def record(name: str, error: Exception | None = None, level: int = logging.ERROR) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord(name, level, "server.py", 1, "the token is %s", ("CANARY",), info, "handle")


def test_one_line_of_a_library_in_ten_seconds() -> None:
    now = 0.0
    few = Reticence(lambda: now)
    first = record("grpc._cython.cygrpc", ValueError("CANARY"))
    assert few.filter(first)
    assert first.getMessage() == "ValueError; 0 more since the last such line"
    assert first.exc_info is None
    assert not any(few.filter(record("grpc.aio", ValueError("CANARY"))) for _ in range(7))
    assert few.filter(record("asyncio", ValueError("CANARY"))), "each library has its own"
    now = 10.0
    again = record("grpc")
    assert few.filter(again)
    assert again.getMessage() == "a line of server, handle; 7 more since the last such line"


def test_our_own_lines_are_as_they_are() -> None:
    few = Reticence()
    for _ in range(3):
        ours = record("service.main", ValueError("x"))
        assert few.filter(ours)
        assert ours.exc_info is not None
        assert ours.getMessage() == "the token is CANARY"


def test_a_task_that_breaks_tells_where_and_not_what() -> None:
    try:
        raise ValueError("CANARY")
    except ValueError as error:
        line = record("asyncio", error)
    assert Reticence(time.monotonic).filter(line)
    assert "CANARY" not in line.getMessage().replace('ValueError("CANARY")', "")  # but for this file's own source
    assert "test_a_task_that_breaks" in line.getMessage()
