"""Whether a tokens file that is read again stalls streams meanwhile."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.service.conftest import PATIENCE, Server, ask_stream
from tests.service.tenants import metadata
from tests.service.transport.presented import entry

Serve = Callable[..., contextlib.AbstractContextManager[Server]]


def test_reading_10000_tokens_stalls_no_stream(serve: Serve, tmp_path: Path) -> None:
    """The longest time without a token, in the better of two readings, against how long that reading took."""
    path = tmp_path / "t"
    path.write_text("".join(entry(f"tenant{number}", str(number)) for number in range(10_000)))
    shares: list[float] = []
    with serve(f"--auth.tokens-file={path}", "--fake.step-time=0.005") as one:

        def readings() -> int:
            return one.log.read_text().count("tokens read again: 10000 entries")

        for _ in range(2):
            stream = one.generation.GenerateStream(ask_stream("x", 4000), metadata=metadata("7"), timeout=4 * PATIENCE)
            next(stream)
            known, longest = readings(), 0.0
            one.process.send_signal(signal.SIGHUP)
            begun = before = time.monotonic()
            while readings() == known:
                next(stream)
                now = time.monotonic()
                longest, before = max(longest, now - before), now
            shares.append(longest / (before - begun))
            stream.cancel()
    assert min(shares) < 0.2, shares
