"""How long a server takes to end that is told to, twice."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.service.conftest import PATIENCE, Server, ask_stream

Serve = Callable[..., contextlib.AbstractContextManager[Server]]


def test_a_second_signal_does_not_wait_for_a_hung_engine(serve: Serve) -> None:
    """Nor does it matter how many more come."""
    with serve("--drain.timeout=600") as server:
        stream = server.generation.GenerateStream(ask_stream("long", 3000), timeout=60)
        next(stream)
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        server.process.terminate()
        while "draining" not in server.log.read_text():
            time.sleep(0.01)
        began = time.monotonic()
        while server.process.poll() is None:
            server.process.terminate()
            time.sleep(0.05)
        assert time.monotonic() - began < 2  # 0.2 s where nothing else runs
        assert server.process.wait(PATIENCE) == 1
        assert not Path(f"/proc/{engine}").exists()
